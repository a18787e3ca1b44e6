//! Reports why a candidate does not lead.

use crate::Error;

/// Why a candidate does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standby<'a> {
    /// This other candidate holds the Lease.
    Behind(&'a str),
    /// The last attempt to acquire it failed.
    Failed(&'a str),
}

/// Logs each new leader and each new failure once, and passes both on.
pub(super) struct StandbyReporter<'a, F> {
    lease: &'a str,
    identity: &'a str,
    notify: F,
    leader: String,
    failure: Option<String>,
}

impl<'a, F: FnMut(Standby<'_>)> StandbyReporter<'a, F> {
    pub fn new(lease: &'a str, identity: &'a str, notify: F) -> Self {
        Self {
            lease,
            identity,
            notify,
            leader: String::new(),
            failure: None,
        }
    }

    /// Takes the observed holder of the Lease.
    pub fn on_holder(&mut self, holder: Option<&String>) {
        let Some(leader) = holder.filter(|holder| *holder != self.identity) else {
            return;
        };
        if self.leader != *leader {
            tracing::info!(lease = self.lease, leader, "another replica leads");
            self.leader.clone_from(leader);
        } else if self.failure.is_none() {
            return;
        }
        self.failure = None;
        (self.notify)(Standby::Behind(leader));
    }

    /// The Lease seemed free and could not be acquired.
    pub fn on_error(&mut self, error: &Error) {
        let (lease, error) = (self.lease, error.to_string());
        if self.failure.as_ref() == Some(&error) {
            tracing::debug!(lease, error, "still cannot acquire the Lease");
            return;
        }
        tracing::warn!(
            lease,
            error,
            "cannot acquire the Lease; repeats are logged at debug"
        );
        (self.notify)(Standby::Failed(&error));
        self.failure = Some(error);
    }
}
