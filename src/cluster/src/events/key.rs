//! What makes two events the same.

use std::sync::Arc;

/// Type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    /// Normal operation.
    Normal,
    /// A user should check.
    Warning,
}

/// Events with the same key are repeats of one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct EventKey {
    pub component: Arc<str>,
    pub uid: String,
    pub type_: EventType,
    pub reason: String,
    pub note: String,
}
