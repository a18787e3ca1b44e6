//! The changes of several watches, one after the other; a panic in the handling of one affects no other.

use std::fmt::Display;
use std::future::poll_fn;
use std::task::{Context, Poll};

use tokio::sync::mpsc::UnboundedReceiver;

use super::change_handler::ChangeHandler;

/// Events from several watches. An event whose handling panicked comes again after a pause.
pub struct WatchEvents<E> {
    sources: Vec<Box<dyn Source<E> + Send>>,
    /// The source that is asked first, in turns.
    first: usize,
    handler: ChangeHandler<E>,
}

trait Source<E> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<E>>;
    fn try_next(&mut self) -> Option<E>;
}

struct Watch<T, E> {
    changes: UnboundedReceiver<T>,
    event: fn(T) -> E,
}

impl<T, E> Source<E> for Watch<T, E> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<E>> {
        self.changes.poll_recv(cx).map(|change| change.map(self.event))
    }

    fn try_next(&mut self) -> Option<E> {
        self.changes.try_recv().ok().map(self.event)
    }
}

impl<E: Display + 'static> WatchEvents<E> {
    /// No events yet; `task` is the name in logs and metrics.
    pub fn new(task: &'static str) -> Self {
        Self {
            sources: Vec::new(),
            first: 0,
            handler: ChangeHandler::new(task),
        }
    }

    /// Adds the changes of a watch. [`Self::drain`] handles watches in the order in which they were added.
    #[must_use]
    pub fn with<T: Send + 'static>(mut self, changes: UnboundedReceiver<T>, event: fn(T) -> E) -> Self {
        self.sources.push(Box::new(Watch { changes, event }));
        self
    }

    /// The next event, for [`Self::handle`]; `None` when all senders are dropped, which happens at shutdown.
    pub async fn next(&mut self) -> Option<E> {
        let (sources, first) = (&mut self.sources, &mut self.first);
        let next = poll_fn(|cx| {
            let mut open = false;
            for step in 0..sources.len() {
                let at = (*first + step) % sources.len();
                match sources.get_mut(at).map(|source| source.poll_next(cx)) {
                    Some(Poll::Ready(Some(event))) => {
                        *first = at + 1;
                        return Poll::Ready(Some(event));
                    }
                    Some(Poll::Pending) => open = true,
                    Some(Poll::Ready(None)) | None => {}
                }
            }
            if open { Poll::Pending } else { Poll::Ready(None) }
        });
        tokio::select! {
            event = next => event,
            event = self.handler.next_retry(), if self.handler.has_pending() => Some(event),
        }
    }

    /// Handles all events that have arrived.
    pub fn drain(&mut self, handle: impl FnMut(&E)) {
        self.drain_some(usize::MAX, handle);
    }

    /// Handles this many of the events that have arrived of each watch; returns whether there may be more.
    pub fn drain_some(&mut self, max: usize, mut handle: impl FnMut(&E)) -> bool {
        let mut may_be_more = false;
        for source in &mut self.sources {
            let mut left = max;
            while left > 0 {
                let Some(event) = source.try_next() else { break };
                self.handler.handle(event, &mut handle);
                left -= 1;
            }
            may_be_more |= left == 0;
        }
        may_be_more
    }

    /// Handles one event, after an earlier one of the same object whose handling panicked.
    pub fn handle(&mut self, event: E, handle: impl FnMut(&E)) {
        self.handler.handle(event, handle);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    #[tokio::test]
    async fn all_watches_have_their_turn_until_the_last_one_ends() {
        let (pods, pods_rx) = unbounded_channel();
        let (sets, sets_rx) = unbounded_channel::<u32>();
        let mut events = WatchEvents::new("test")
            .with(pods_rx, |name: &str| name.to_owned())
            .with(sets_rx, |number| number.to_string());
        for number in 0..3 {
            pods.send("pod").unwrap();
            sets.send(number).unwrap();
        }
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(events.next().await.unwrap());
        }
        assert_eq!(seen, ["pod", "0", "pod", "1"]);
        sets.send(3).unwrap();
        let mut drained = Vec::new();
        assert!(events.drain_some(1, |event| drained.push(event.clone())));
        events.drain(|event| drained.push(event.clone()));
        assert_eq!(drained, ["pod", "2", "3"]);
        drop(pods);
        sets.send(4).unwrap();
        assert_eq!(events.next().await.as_deref(), Some("4"));
        drop(sets);
        assert_eq!(events.next().await, None);
    }
}
