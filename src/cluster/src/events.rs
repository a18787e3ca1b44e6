//! Events on objects, published in the background.
//!
//! Repeats of one event raise its count instead of creating a new object, as client-go's recorder does; many similar
//! ones are combined, and the rate per object is limited (`correlator`).

mod correlator;
mod key;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;

use super::{Clock, Error, write};
use correlator::{EventCorrelator, FifoCache};
use key::EventKey;
pub use key::EventType;
use kruise_ops::metrics::metrics;
use kruise_ops::panics::catch_panic;

struct PendingEvent {
    object: ObjectReference,
    key: EventKey,
    action: String,
}

/// Publishes events; clones share the queue.
#[derive(Clone)]
pub struct EventRecorder {
    component: Arc<str>,
    queue: mpsc::Sender<PendingEvent>,
    queued: QueuedEvents,
}

/// How many events of each namespace wait.
#[derive(Clone, Default)]
struct QueuedEvents(Arc<Mutex<HashMap<String, usize>>>);

impl QueuedEvents {
    /// Counts one more if `send` accepts it and its namespace has not used up its share. Returns whether it does.
    fn add(&self, namespace: &str, send: impl FnOnce() -> bool) -> bool {
        let mut queued = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = queued.get(namespace).copied().unwrap_or_default();
        let added = count < MAX_QUEUED_PER_NAMESPACE && send();
        if added {
            queued.insert(namespace.to_owned(), count + 1);
        }
        added
    }

    fn remove(&self, namespace: &str) {
        let mut queued = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = queued.remove(namespace).unwrap_or_default().saturating_sub(1);
        if left > 0 {
            queued.insert(namespace.to_owned(), left);
        }
    }
}

/// Events that wait to be written, as many as client-go's recorder keeps; more are dropped and counted, because an
/// event must never block.
const QUEUE_CAPACITY: usize = 1000;
/// The share of one namespace, so that its events leave room for those of others.
const MAX_QUEUED_PER_NAMESPACE: usize = QUEUE_CAPACITY / 2;
/// How many past events are remembered to count their repeats.
const MAX_REMEMBERED_EVENTS: usize = 1024;
/// Prefix of the latest of many notes that are combined into one event; client-go's text.
const COMBINED_PREFIX: &str = "(combined from similar events): ";
/// The API server's limit for `metadata.name`, in bytes.
const NAME_LIMIT: usize = 253;
/// The API server's limit for `message`, in bytes.
const MESSAGE_LIMIT: usize = 1024;

impl EventRecorder {
    /// Starts the task that writes; it ends when the last clone is dropped.
    pub(super) fn start(client: Client, clock: Clock, component: &str, host: Option<&str>) -> Self {
        let (queue, rx) = mpsc::channel(QUEUE_CAPACITY);
        let (host, queued) = (host.map(str::to_owned), QueuedEvents::default());
        tokio::spawn(publish_all(
            EventWriter { client, clock, host },
            rx,
            queued.clone(),
        ));
        Self {
            component: component.into(),
            queue,
            queued,
        }
    }

    /// The same, with a different component as the source: `kubectl describe` shows it, and field selectors match it.
    #[must_use]
    pub fn with_component(&self, component: &str) -> Self {
        Self {
            component: component.into(),
            queue: self.queue.clone(),
            queued: self.queued.clone(),
        }
    }

    /// Records `reason` with the text `note` on `object`; `action` is what was done. Returns at once and never fails:
    /// if the API server accepts no events they are counted as dropped.
    pub fn publish(
        &self,
        object: ObjectReference,
        type_: EventType,
        reason: &str,
        action: &str,
        note: String,
    ) {
        let uid = object.uid.clone().unwrap_or_default();
        let key = EventKey {
            component: Arc::clone(&self.component),
            uid,
            type_,
            reason: reason.to_owned(),
            note: truncate_message(note),
        };
        let namespace = object.namespace.clone().unwrap_or_default();
        let event = PendingEvent {
            object,
            key,
            action: action.to_owned(),
        };
        if !self.queued.add(&namespace, || self.queue.try_send(event).is_ok()) {
            metrics().events_dropped.inc();
        }
    }
}

/// Truncates to the API server's limit, at a character boundary.
fn truncate_message(mut text: String) -> String {
    if text.len() > MESSAGE_LIMIT {
        let end = text.floor_char_boundary(MESSAGE_LIMIT - 3);
        text.truncate(end);
        text.push('…');
    }
    text
}

struct EventWriter {
    client: Client,
    clock: Clock,
    host: Option<String>,
}

/// A written event: its name, and how often it occurred, including since then.
struct WrittenEvent {
    name: String,
    count: i32,
}

async fn publish_all(writer: EventWriter, mut rx: mpsc::Receiver<PendingEvent>, queued: QueuedEvents) {
    let mut written: FifoCache<EventKey, WrittenEvent> = FifoCache::new(MAX_REMEMBERED_EVENTS);
    let mut correlator = EventCorrelator::default();
    while let Some(event) = rx.recv().await {
        queued.remove(event.object.namespace.as_deref().unwrap_or_default());
        let reason = event.key.reason.clone();
        // The cache of past events may be half-written after a panic; it affects counts only.
        let published = Box::pin(publish_one(&writer, event, &mut written, &mut correlator));
        if catch_panic("events", reason, published).await.is_err() {
            metrics().events_dropped.inc();
        }
    }
}

async fn publish_one(
    writer: &EventWriter,
    mut event: PendingEvent,
    written: &mut FifoCache<EventKey, WrittenEvent>,
    correlator: &mut EventCorrelator,
) {
    let decision = correlator.correlate(&event.key, Instant::now());
    let mut key = event.key.clone();
    if decision.combined {
        key.note = COMBINED_PREFIX.to_owned();
        event.key.note = truncate_message(format!("{COMBINED_PREFIX}{}", event.key.note));
    }
    let previous = written.get_mut(&key).map(|previous| {
        previous.count = previous.count.saturating_add(1);
        &*previous
    });
    if !decision.write_now {
        metrics().events_held_back.inc();
        return;
    }
    match writer.publish(&event, previous).await {
        Ok(event) => written.insert(key, event),
        Err(error) => {
            metrics().events_dropped.inc();
            tracing::debug!(%error, reason = event.key.reason, "event not written");
        }
    }
}

impl EventWriter {
    async fn publish(
        &self,
        pending: &PendingEvent,
        previous: Option<&WrittenEvent>,
    ) -> Result<WrittenEvent, Error> {
        let namespace = pending.object.namespace.as_deref().unwrap_or("default");
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        if let Some(WrittenEvent { name, count }) = previous {
            let now = Time(self.clock.now());
            let patch = json!({ "count": count, "lastTimestamp": now, "message": pending.key.note });
            match write::patch_merge(&api, name, &patch).await {
                Err(error) if error.not_found() => {} // expired meanwhile: create it again
                result => {
                    result?;
                    let (name, count) = (name.clone(), *count);
                    return Ok(WrittenEvent { name, count });
                }
            }
        }
        let event = self.event(pending, namespace);
        write::create(&api, &event).await?;
        Ok(WrittenEvent {
            name: event.metadata.name.unwrap_or_default(),
            count: event.count.unwrap_or(1),
        })
    }

    fn event(&self, pending: &PendingEvent, namespace: &str) -> Event {
        let now = self.clock.now();
        let name = pending.object.name.as_deref().unwrap_or("unknown");
        let component = Some(pending.key.component.to_string());
        Event {
            metadata: ObjectMeta {
                name: Some(event_name(name, now)),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: pending.object.clone(),
            type_: Some(match pending.key.type_ {
                EventType::Normal => "Normal".to_owned(),
                EventType::Warning => "Warning".to_owned(),
            }),
            reason: Some(pending.key.reason.clone()),
            action: Some(pending.action.clone()),
            message: Some(pending.key.note.clone()),
            source: Some(EventSource {
                component: component.clone(),
                host: self.host.clone(),
            }),
            reporting_instance: self.host.clone().or_else(|| component.clone()),
            reporting_component: component,
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            count: Some(1),
            ..Event::default()
        }
    }
}

/// `OBJECT.NANOSECONDS`, as client-go names them, cut to a valid name.
fn event_name(object: &str, now: Timestamp) -> String {
    let stamp = format!(".{:x}", now.as_nanosecond());
    let end = object.floor_char_boundary(NAME_LIMIT - stamp.len().min(NAME_LIMIT));
    let object = object[..end].trim_end_matches(['.', '-']);
    format!("{object}{stamp}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_name_fits_the_limit_for_any_object_name() {
        let now = Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_nanos(255);
        assert_eq!(event_name("web-0", now), "web-0.ff");
        for object in ["n".repeat(253), "n.".repeat(126), "é".repeat(200), String::new()] {
            let name = event_name(&object, Timestamp::MAX);
            assert!(name.len() <= NAME_LIMIT, "{} bytes: {name}", name.len());
            assert!(!name.contains("..") && !name.contains("-."), "{name}");
        }
    }

    fn pending_event(reason: &str) -> PendingEvent {
        PendingEvent {
            object: ObjectReference::default(),
            key: EventKey {
                component: "test".into(),
                uid: String::new(),
                type_: EventType::Normal,
                reason: reason.to_owned(),
                note: String::new(),
            },
            action: String::new(),
        }
    }

    #[tokio::test]
    async fn panicking_event_does_not_block_others() {
        let (written_tx, mut written) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let written = written_tx.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                let event: Result<Event, _> = serde_json::from_slice(&body);
                let _ = written.send(event.ok().and_then(|event| event.reason));
                http::Response::builder().body(kube::client::Body::from(body.to_vec()))
            }
        });
        let writer = EventWriter {
            client: Client::new(service, "default"),
            clock: Clock::new(),
            host: None,
        };
        let panics = kruise_ops::panics::injected::inject_panic("events", "Panics");
        let (notes, rx) = mpsc::channel(2);
        for reason in ["Panics", "Follows"] {
            assert!(notes.send(pending_event(reason)).await.is_ok());
        }
        drop(notes);
        publish_all(writer, rx, QueuedEvents::default()).await;
        assert_eq!(
            (panics.times(), written.recv().await),
            (1, Some(Some("Follows".to_owned())))
        );
    }

    #[test]
    fn events_of_one_namespace_leave_room_for_others() {
        let (queue, mut rx) = mpsc::channel(QUEUE_CAPACITY);
        let recorder = EventRecorder {
            component: "test".into(),
            queue,
            queued: QueuedEvents::default(),
        };
        let publish = |namespace: &str| {
            let object = ObjectReference {
                namespace: Some(namespace.to_owned()),
                ..ObjectReference::default()
            };
            recorder.publish(object, EventType::Warning, "Failed", "Pull", String::new());
        };
        for _ in 0..2 * QUEUE_CAPACITY {
            publish("noisy");
        }
        publish("quiet");
        let mut namespaces = Vec::new();
        while let Ok(event) = rx.try_recv() {
            let namespace = event.object.namespace.unwrap_or_default();
            recorder.queued.remove(&namespace);
            namespaces.push(namespace);
        }
        let noisy = vec!["noisy".to_owned(); MAX_QUEUED_PER_NAMESPACE];
        assert_eq!(namespaces, [noisy, vec!["quiet".to_owned()]].concat());
        publish("noisy");
        assert!(rx.try_recv().is_ok(), "its share is free again");
    }

    /// The next write needs nothing from the response, so the event is repeated and not created again.
    #[tokio::test]
    async fn event_with_unreadable_answer_counts_as_written() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
            let answer = br#"{"metadata":{"name":"x"},"eventTime":"9999-12-31T23:59:59Z"}"#.to_vec();
            std::future::ready(http::Response::builder().body(kube::client::Body::from(answer)))
        });
        let writer = EventWriter {
            client: Client::new(service, "default"),
            clock: Clock::new(),
            host: None,
        };
        let note = pending_event("");
        let first = writer.publish(&note, None).await.ok();
        let again = first.as_ref().map(|first| WrittenEvent {
            name: first.name.clone(),
            count: 2,
        });
        let again = writer.publish(&note, again.as_ref()).await.ok();
        let names = [&first, &again].map(|past| past.as_ref().map(|past| (&past.name, past.count)));
        assert!(
            matches!(names, [Some((one, 1)), Some((other, 2))] if one == other),
            "{names:?}"
        );
    }

    #[test]
    fn long_notes_are_truncated_at_a_character() {
        let note = truncate_message("é".repeat(2000));
        assert!(
            note.len() <= MESSAGE_LIMIT && note.ends_with('…'),
            "{} bytes",
            note.len()
        );
        assert_eq!(truncate_message("short".into()), "short");
    }
}
