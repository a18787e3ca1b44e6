//! Says why a candidate does not lead.

use super::Sight;
use crate::Error;

/// Why a candidate does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standby<'a> {
    /// This other candidate holds the Lease.
    Behind(&'a str),
    /// The last try to take it failed.
    Failed(&'a str),
}

/// Logs each new leader and each new failure once, and passes both on.
pub(super) struct Report<'a, F> {
    lease: &'a str,
    identity: &'a str,
    tell: F,
    leader: String,
    failure: Option<String>,
}

impl<'a, F: FnMut(Standby<'_>)> Report<'a, F> {
    pub fn new(lease: &'a str, identity: &'a str, tell: F) -> Self {
        Self {
            lease,
            identity,
            tell,
            leader: String::new(),
            failure: None,
        }
    }

    /// What the API server has of the Lease.
    pub fn saw(&mut self, seen: Option<&Sight>) {
        let holder = seen.and_then(|seen| super::holder(&seen.lease));
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
        (self.tell)(Standby::Behind(leader));
    }

    /// The Lease seemed free and could not be taken.
    pub fn failed(&mut self, error: &Error) {
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
        (self.tell)(Standby::Failed(&error));
        self.failure = Some(error);
    }
}
