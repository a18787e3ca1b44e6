//! The changes of several watches, one after the other; a panic in the handling of one affects no other.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::future::poll_fn;
use std::mem;
use std::task::{Context, Poll};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::task::yield_now;

use super::change_handler::ChangeHandler;

/// Events of a watch that are handled without a pause.
const MAX_EVENTS_AT_ONCE: usize = 16;

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

    /// Handles all events and sends what they affect, each key once if they arrived together, until either side is
    /// closed. What exists at the start is handled before the first key is sent.
    pub async fn send_affected<K: Ord, I: IntoIterator<Item = K>>(
        mut self,
        keys: UnboundedSender<K>,
        mut affected_by: impl FnMut(&E) -> I,
    ) {
        let mut affected = BTreeSet::new();
        let mut has_started = false;
        loop {
            let may_be_more =
                self.drain_some(MAX_EVENTS_AT_ONCE, |event| affected.extend(affected_by(event)));
            has_started |= !may_be_more;
            if has_started
                && !mem::take(&mut affected)
                    .into_iter()
                    .all(|key| keys.send(key).is_ok())
            {
                return;
            }
            if may_be_more {
                // Other tasks of the thread run in between: some renew the Lease.
                yield_now().await;
                continue;
            }
            let Some(event) = self.next().await else { return };
            self.handle(event, |event| affected.extend(affected_by(event)));
        }
    }

    /// Handles this many of the events that have arrived of each watch; returns whether there may be more.
    fn drain_some(&mut self, max: usize, mut handle: impl FnMut(&E)) -> bool {
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
    use tokio::sync::watch;

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

    #[tokio::test]
    async fn keys_are_sent_once_after_all_that_exists_and_other_tasks_run_in_between() {
        let (pods, pods_rx) = unbounded_channel();
        for number in 0..100 {
            pods.send(number).unwrap();
        }
        let events = WatchEvents::new("test").with(pods_rx, |number: usize| number);
        let (keys, mut keys_rx) = unbounded_channel();
        let (handled, handled_rx) = watch::channel(0);
        let send = events.send_affected(keys, |number| {
            handled.send_modify(|count| *count += 1);
            [number % 2]
        });
        let observe = async {
            assert_eq!(
                *handled_rx.borrow(),
                MAX_EVENTS_AT_ONCE,
                "another task has run meanwhile"
            );
            assert_eq!(keys_rx.recv().await, Some(0));
            assert_eq!(*handled_rx.borrow(), 100);
            assert_eq!(keys_rx.recv().await, Some(1));
            pods.send(7).unwrap();
            assert_eq!(keys_rx.recv().await, Some(1), "and neither of them again");
            drop(pods);
            assert_eq!(keys_rx.recv().await, None);
        };
        tokio::join!(biased; send, observe);
    }
}
