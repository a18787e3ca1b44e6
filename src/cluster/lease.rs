//! Leader election on a Lease.
//!
//! Own code rather than the crate kube-lease-manager (0.13): that one decides that a Lease has expired by
//! comparing `renewTime`, which the holder's clock wrote, with the local wall clock, so two machines whose
//! clocks differ can both lead, or nobody does. Here a Lease expires when the local monotonic clock has
//! seen no change of it for the holder's own duration, as in client-go. A watch tells of changes, so a
//! Lease that its holder gave up is taken at once.

mod hold;

use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use tokio::time::Instant;

use super::{Clock, Cluster, Error, Fence, write};

/// How long others wait without a renewal before they take over. Whole seconds, for the field has no finer unit.
pub const DURATION: Duration = Duration::from_secs(4);
/// How long the holder goes on without a successful renewal. Less than [`DURATION`], so that it has stopped
/// before another one starts.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(3);
/// How often the holder renews.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Pause after a failed attempt to take or renew the Lease.
const RETRY: Duration = Duration::from_millis(500);
/// How long a call may take, but for renewals. Where answers take longer all the time the Lease could not be held, and is
/// not taken: a renewal begins with the answer to the one before, and both are to fit into [`RENEW_DEADLINE`].
const CALL: Duration = Duration::from_millis(1500);

/// The Lease is no longer ours.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// It could not be renewed in time.
    #[error("lease {name} could not be renewed for {RENEW_DEADLINE:?}: {last}")]
    NotRenewed {
        /// Name of the Lease.
        name: String,
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
    /// Lease is surely its own.
    #[must_use]
    pub fn new(cluster: &Cluster, namespace: &str, name: &str, identity: String, fence: Fence) -> Self {
        Self {
            api: Api::namespaced(cluster.client.clone(), namespace),
            clock: cluster.clock.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity,
            fence,
        }
    }

    /// Waits until the Lease is ours; forever if need be.
    pub async fn acquire(&self) -> Held {
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let mut changes = std::pin::pin!(watcher(self.api.clone(), config));
        let mut seen: Option<Sight> = None;
        let mut look = Instant::now();
        loop {
            tokio::select! {
                change = changes.next() => match change {
                    Some(Ok(Event::Apply(lease) | Event::InitApply(lease))) => {
                        seen = Some(sight(seen, lease));
                        look = self.due(seen.as_ref());
                    }
                    Some(Ok(Event::Delete(_))) => { seen = None; look = Instant::now(); }
                    Some(Ok(_)) => {}
                    // The watch comes back by itself; reads below go on meanwhile.
                    Some(Err(error)) => {
                        tracing::debug!(%error, "watch of the lease failed");
                        tokio::time::sleep(RETRY).await;
                    }
                    None => tokio::time::sleep(RETRY).await,
                },
                () = tokio::time::sleep_until(look) => {
                    match self.attempt(&mut seen).await {
                        Ok(Some(held)) => return held,
                        Ok(None) => look = self.due(seen.as_ref()).max(Instant::now() + RETRY),
                        Err(error) => {
                            tracing::debug!(lease = self.name, %error, "lease not taken");
                            look = Instant::now() + RETRY;
                        }
                    }
                }
            }
        }
    }

    /// When to try for the Lease.
    fn due(&self, seen: Option<&Sight>) -> Instant {
        seen.map_or_else(Instant::now, |seen| free_at(seen, &self.identity))
    }

    /// Opens the fence for as long as the Lease is surely ours after that write.
    fn held(&self, lease: Lease, since: Instant) -> Held {
        self.fence.move_to(since + RENEW_DEADLINE);
        Held { lease, since }
    }

    /// Takes the Lease if nobody holds it, or its holder was silent for too long.
    async fn attempt(&self, seen: &mut Option<Sight>) -> Result<Option<Held>, Error> {
        let Some(lease) = within(write::get(&self.api, &self.name)).await? else {
            let began = Instant::now();
            return match within(write::create(&self.api, &self.fresh(None))).await {
                Err(error) if error.already_exists() => Ok(None),
                other => Ok(Some(self.held(other?, began))),
            };
        };
        let now = sight(seen.take(), lease);
        let began = Instant::now();
        let taken = if began >= free_at(&now, &self.identity) {
            match within(write::replace(&self.api, &self.fresh(Some(&now.lease)))).await {
                Err(error) if error.conflict() => None,
                other => Some(self.held(other?, began)),
            }
        } else {
            None
        };
        *seen = Some(now);
        Ok(taken)
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
                lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
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

fn duration_of(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|s| s.lease_duration_seconds);
    seconds
        .and_then(|s| u64::try_from(s).ok())
        .map_or(DURATION, Duration::from_secs)
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

/// From when on `identity` may take the Lease: at once where nobody else holds it.
fn free_at(seen: &Sight, identity: &str) -> Instant {
    match holder(&seen.lease) {
        Some(other) if other != identity => seen.at + duration_of(&seen.lease),
        _ => seen.at,
    }
}

async fn within<T>(call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout(CALL, call).await {
        Ok(result) => result,
        Err(_) => Err(Error::Timeout {
            verb: "renew",
            kind: "Lease".to_owned(),
            after: CALL,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, seconds: i32, version: &str) -> Lease {
        Lease {
            metadata: ObjectMeta {
                resource_version: Some(version.to_owned()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_duration_seconds: Some(seconds),
                // A holder whose clock is far in the past or future changes nothing.
                renew_time: Some(MicroTime(Timestamp::MIN)),
                ..LeaseSpec::default()
            }),
        }
    }

    #[test]
    fn a_lease_expires_by_the_local_clock_alone() {
        let start = Instant::now();
        let seen = Sight {
            lease: lease("other", 15, "1"),
            at: start,
        };
        assert_eq!(free_at(&seen, "me"), start + Duration::from_secs(15));
        assert_eq!(free_at(&seen, "other"), start, "its own holder need not wait");
    }

    #[test]
    fn a_renewal_starts_the_time_anew_and_a_second_look_does_not() {
        let start = Instant::now() - Duration::from_secs(60);
        let seen = Sight {
            lease: lease("other", 15, "1"),
            at: start,
        };
        let same = sight(Some(seen.clone()), lease("other", 15, "1"));
        assert_eq!(same.at, start);
        let renewed = sight(Some(seen), lease("other", 15, "2"));
        assert!(renewed.at > start);
    }

    #[test]
    fn a_lease_without_holder_is_free() {
        let seen = Sight {
            lease: lease("", 15, "1"),
            at: Instant::now(),
        };
        assert_eq!(free_at(&seen, "me"), seen.at);
    }

    #[test]
    fn the_holder_stops_before_another_one_starts() {
        assert!(RENEW_DEADLINE + RETRY <= DURATION);
        assert!(CALL * 2 <= RENEW_DEADLINE, "who takes it can hold it");
    }
}
