//! Leader election on a Lease.
//!
//! Own code rather than the crate kube-lease-manager (0.13): that one decides that a Lease has expired by
//! comparing `renewTime`, which the holder's clock wrote, with the local wall clock, so two machines whose
//! clocks differ can both lead, or nobody does. Here a Lease expires when the local monotonic clock has
//! seen no change of it for the holder's own duration, as in client-go. A watch tells of changes, so a
//! Lease that its holder released is taken at once.

mod hold;
mod standby;
mod timing;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Change, Clock, Cluster, Error, Fence, later, optional_mirror, write};
use standby::Report;
pub use standby::Standby;
pub use timing::{Timing, WrongTiming};

/// The Lease is no longer ours.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// It could not be renewed in time.
    #[error("lease {name} could not be renewed for {after:?}: {last}")]
    NotRenewed {
        /// Name of the Lease.
        name: String,
        /// How long it was tried.
        after: Duration,
        /// The last error.
        last: String,
    },
    /// Somebody else holds it.
    #[error("lease {name} was taken by {by:?}")]
    Taken {
        /// Name of the Lease.
        name: String,
        /// The new holder.
        by: String,
    },
}

/// A candidate for one Lease.
pub struct Election {
    api: Api<Lease>,
    clock: Clock,
    namespace: String,
    name: String,
    identity: String,
    timing: Timing,
    fence: Fence,
}

/// The Lease while it is ours.
#[derive(Debug)]
pub struct Held {
    lease: Lease,
    /// When the write began that made it ours, or renewed it last.
    since: Instant,
}

/// What was last seen of the Lease, and when locally.
#[derive(Clone, Debug)]
struct Sight {
    lease: Lease,
    at: Instant,
}

impl Election {
    /// A candidate that calls itself `identity`, which must differ between processes. `fence` is open while the
    /// Lease is ours by our clock.
    #[must_use]
    pub fn new(
        cluster: &Cluster,
        namespace: &str,
        name: &str,
        identity: String,
        timing: Timing,
        fence: Fence,
    ) -> Self {
        Self {
            api: Api::namespaced(cluster.client.clone(), namespace),
            clock: cluster.clock.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity,
            timing,
            fence,
        }
    }

    /// Waits until the Lease is ours; forever if need be. Until then `tell` is given what is in the way, when that changes.
    pub async fn acquire(&self, tell: impl FnMut(Standby<'_>)) -> Held {
        let only = ListParams::default().fields(&format!("metadata.name={}", self.name));
        let (seen, mut watching) = optional_mirror(self.api.clone(), only, Some::<Lease>);
        let mut changes = seen.subscribe();
        let mut compete = Box::pin(self.compete(&mut changes, tell));
        tokio::select! {
            held = &mut compete => held,
            // It never ends; without it the Lease is looked at when it is due.
            () = &mut watching => compete.await,
        }
    }

    /// Tries for the Lease when it is free, or may be.
    async fn compete(
        &self,
        changes: &mut mpsc::UnboundedReceiver<Change<Lease>>,
        tell: impl FnMut(Standby<'_>),
    ) -> Held {
        let mut seen: Option<Sight> = None;
        let mut report = Report::new(&self.name, &self.identity, tell);
        let mut look = Instant::now();
        loop {
            tokio::select! {
                Some(change) = changes.recv() => {
                    seen = change.new.map(|lease| sight(seen, Lease::clone(&lease)));
                    report.saw(seen.as_ref());
                    look = self.due(seen.as_ref());
                }
                () = tokio::time::sleep_until(look) => {
                    let again = later(Instant::now(), self.timing.retry_period());
                    look = match self.attempt(&mut seen).await {
                        Ok(Some(held)) => return held,
                        Ok(None) => {
                            report.saw(seen.as_ref());
                            self.due(seen.as_ref()).max(again)
                        }
                        Err(error) => {
                            report.failed(&error);
                            again
                        }
                    };
                }
            }
        }
    }

    /// When to try for the Lease.
    fn due(&self, seen: Option<&Sight>) -> Instant {
        seen.map_or_else(Instant::now, |seen| self.free_at(seen))
    }

    /// From when on the Lease may be taken: at once where nobody else holds it.
    fn free_at(&self, seen: &Sight) -> Instant {
        match holder(&seen.lease) {
            Some(other) if *other != self.identity => {
                let lasts = duration_of(&seen.lease).unwrap_or(self.timing.lease_duration());
                later(seen.at, lasts)
            }
            _ => seen.at,
        }
    }

    /// Opens the fence for as long as nobody else may take the Lease after that write.
    fn held(&self, lease: Lease, since: Instant) -> Held {
        self.fence.move_to(later(since, self.timing.renew_deadline()));
        Held { lease, since }
    }

    /// Takes the Lease if nobody holds it, or its holder was silent for too long.
    async fn attempt(&self, seen: &mut Option<Sight>) -> Result<Option<Held>, Error> {
        let Some(lease) = self.within(write::get(&self.api, &self.name)).await? else {
            let began = Instant::now();
            return match self.within(write::create(&self.api, &self.fresh(None))).await {
                Err(error) if error.already_exists() => Ok(None),
                other => Ok(Some(self.held(other?.object()?, began))),
            };
        };
        // Kept before the write: one that fails must not start the wait anew.
        let now = sight(seen.take(), lease);
        let now = seen.insert(now);
        let began = Instant::now();
        if began < self.free_at(now) {
            return Ok(None);
        }
        let next = self.fresh(Some(&now.lease));
        match self.within(write::replace(&self.api, &next)).await {
            Err(error) if error.conflict() => Ok(None),
            other => Ok(Some(self.held(other?.object()?, began))),
        }
    }

    fn fresh(&self, old: Option<&Lease>) -> Lease {
        let now = self.now();
        let changes = old
            .and_then(|l| l.spec.as_ref()?.lease_transitions)
            .unwrap_or_default();
        Lease {
            metadata: old.map_or_else(
                || ObjectMeta {
                    name: Some(self.name.clone()),
                    namespace: Some(self.namespace.clone()),
                    ..ObjectMeta::default()
                },
                |l| l.metadata.clone(),
            ),
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: i32::try_from(self.timing.lease_duration().as_secs()).ok(),
                acquire_time: now.clone(),
                renew_time: now,
                lease_transitions: Some(changes.saturating_add(i32::from(old.is_some()))),
                ..LeaseSpec::default()
            }),
        }
    }

    fn renewal(&self, lease: &Lease) -> Lease {
        let mut next = lease.clone();
        if let Some(spec) = next.spec.as_mut() {
            spec.renew_time = self.now();
        }
        next
    }

    async fn within<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let after = self.timing.call();
        let Ok(result) = tokio::time::timeout(after, call).await else {
            let kind = "Lease".to_owned();
            return Err(Error::Timeout {
                verb: "renew",
                kind,
                after,
            });
        };
        result
    }

    fn now(&self) -> Option<MicroTime> {
        // To the microsecond, as it comes back.
        let now = self.clock.now();
        Some(MicroTime(
            Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now),
        ))
    }
}

fn holder(lease: &Lease) -> Option<&String> {
    lease
        .spec
        .as_ref()?
        .holder_identity
        .as_ref()
        .filter(|h| !h.is_empty())
}

fn duration_of(lease: &Lease) -> Option<Duration> {
    let seconds = lease.spec.as_ref()?.lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

/// The same Lease as before keeps the time at which it was first seen.
fn sight(old: Option<Sight>, lease: Lease) -> Sight {
    match old {
        Some(old) if old.lease.resource_version() == lease.resource_version() => old,
        _ => Sight {
            lease,
            at: Instant::now(),
        },
    }
}

#[cfg(test)]
mod tests;
