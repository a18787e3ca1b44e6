//! Leader election on a Lease.
//!
//! Own code rather than the crate kube-lease-manager (0.13): that one decides that a Lease has expired by comparing
//! `renewTime`, which the holder's clock wrote, with the local wall clock, so two machines whose clocks differ can both
//! lead, or neither does. Here a Lease expires when the local monotonic clock has seen no change of it for the holder's
//! own duration, as in client-go. A watch reports changes, so a Lease that its holder released is acquired at once.

mod renew;
mod standby;
mod timing;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::ListParams;
use kube::{Api, Resource, ResourceExt};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::retry::instant_after;
use super::{Change, Clock, Cluster, Error, Fence, watch, write};
use kruise_ops::Watches;
pub use standby::Standby;
use standby::StandbyReporter;
pub use timing::{InvalidLeaseTiming, LeaseTiming};

/// The Lease is no longer ours.
#[derive(Debug, thiserror::Error)]
pub enum LeaseLost {
    /// It could not be renewed in time.
    #[error("lease {name} could not be renewed for {after:?}: {last}")]
    NotRenewed {
        /// Name of the Lease.
        name: String,
        /// How long renewals were attempted.
        after: Duration,
        /// The last error.
        last: String,
    },
    /// Another candidate holds it.
    #[error("lease {name} was taken by {by:?}")]
    Taken {
        /// Name of the Lease.
        name: String,
        /// Identity of the new holder.
        by: String,
    },
}

/// A candidate for one Lease.
pub struct Election {
    api: Api<Lease>,
    clock: Clock,
    watches: Watches,
    namespace: String,
    name: String,
    identity: String,
    timing: LeaseTiming,
    fence: Fence,
}

/// The Lease while it is ours.
#[derive(Debug)]
pub struct HeldLease {
    lease: Lease,
    /// When the write began that acquired it, or renewed it last.
    renewed_at: Instant,
}

/// The last observed state of the Lease, and its local time.
#[derive(Clone, Debug)]
struct ObservedLease {
    lease: Lease,
    observed_at: Instant,
}

impl ObservedLease {
    fn holder(&self) -> Option<&String> {
        holder(&self.lease)
    }
}

impl Election {
    /// A candidate named `identity`, which must differ between processes. `fence` is open while the Lease is ours by
    /// our clock.
    #[must_use]
    pub fn new(
        cluster: &Cluster,
        namespace: &str,
        name: &str,
        identity: String,
        timing: LeaseTiming,
        fence: Fence,
    ) -> Self {
        Self {
            api: Api::namespaced(cluster.client.clone(), namespace),
            clock: cluster.clock.clone(),
            watches: cluster.watches.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity,
            timing,
            fence,
        }
    }

    /// Waits until the Lease is ours, forever if necessary. Until then `on_standby` gets the reason, when it changes.
    pub async fn acquire(&self, on_standby: impl FnMut(Standby<'_>)) -> HeldLease {
        let params = ListParams::default().fields(&format!("metadata.name={}", self.name));
        // Optional: without it the Lease is read when it is due.
        let watch = self.watches.register_optional(&Lease::kind(&()));
        let (store, mut reflector) =
            watch::new_reflector(self.api.clone(), params, None, watch, Some::<Lease>);
        let mut changes = store.subscribe();
        let mut acquiring = Box::pin(self.acquire_with_changes(&mut changes, on_standby));
        tokio::select! {
            held = &mut acquiring => held,
            // It never ends.
            () = &mut reflector => acquiring.await,
        }
    }

    /// Tries to acquire the Lease when it is free, or may be.
    async fn acquire_with_changes(
        &self,
        changes: &mut mpsc::UnboundedReceiver<Change<Lease>>,
        on_standby: impl FnMut(Standby<'_>),
    ) -> HeldLease {
        let mut observed: Option<ObservedLease> = None;
        let mut reporter = StandbyReporter::new(&self.name, &self.identity, on_standby);
        let mut next_attempt = Instant::now();
        loop {
            tokio::select! {
                Some(change) = changes.recv() => {
                    next_attempt = match change.new {
                        Some(lease) => {
                            let lease = observe(observed, Lease::clone(&lease));
                            let available_at = self.available_at(&lease);
                            observed = Some(lease);
                            available_at
                        }
                        None => observed.as_ref().map_or_else(Instant::now, |last| self.creatable_at(last)),
                    };
                    reporter.on_holder(observed.as_ref().and_then(ObservedLease::holder));
                }
                () = tokio::time::sleep_until(next_attempt) => {
                    let retry_at = instant_after(Instant::now(), self.timing.retry_period());
                    next_attempt = match self.try_acquire(&mut observed).await {
                        Ok(Some(held)) => return held,
                        Ok(None) => {
                            reporter.on_holder(observed.as_ref().and_then(ObservedLease::holder));
                            let available_at = observed.as_ref().map(|lease| self.available_at(lease));
                            available_at.map_or(retry_at, |at| at.max(retry_at))
                        }
                        Err(error) => {
                            reporter.on_error(&error);
                            retry_at
                        }
                    };
                }
            }
        }
    }

    /// From when on a Lease that does not exist may be created. The last holder of a deleted one learns of that when it
    /// renews; a duration that was edited into it is not waited for.
    fn creatable_at(&self, last: &ObservedLease) -> Instant {
        let own = instant_after(last.observed_at, self.timing.lease_duration());
        self.available_at(last).min(own)
    }

    /// From when on the Lease may be acquired: at once if no other candidate holds it.
    fn available_at(&self, observed: &ObservedLease) -> Instant {
        match holder(&observed.lease) {
            Some(other) if *other != self.identity => {
                let duration = lease_duration(&observed.lease).unwrap_or(self.timing.lease_duration());
                instant_after(observed.observed_at, duration)
            }
            _ => observed.observed_at,
        }
    }

    /// Opens the fence for as long as no other candidate may acquire the Lease after that write.
    fn record_renewal(&self, lease: Lease, renewed_at: Instant) -> HeldLease {
        self.fence
            .set_deadline(instant_after(renewed_at, self.timing.renew_deadline()));
        HeldLease { lease, renewed_at }
    }

    /// Acquires the Lease if it has no holder, or its holder was silent for too long.
    async fn try_acquire(&self, observed: &mut Option<ObservedLease>) -> Result<Option<HeldLease>, Error> {
        let Some(lease) = self.with_timeout(write::get(&self.api, &self.name)).await? else {
            let began = Instant::now();
            if let Some(last) = observed
                && began < self.creatable_at(last)
            {
                return Ok(None);
            }
            return match self
                .with_timeout(write::create(&self.api, &self.new_lease(None)))
                .await
            {
                Err(error) if error.already_exists() => Ok(None),
                other => Ok(Some(self.record_renewal(other?.object()?, began))),
            };
        };
        // Kept before the write: a failed write must not restart the wait.
        let current = observe(observed.take(), lease);
        let current = observed.insert(current);
        let began = Instant::now();
        if began < self.available_at(current) {
            return Ok(None);
        }
        let next = self.new_lease(Some(&current.lease));
        match self.with_timeout(write::replace(&self.api, &next)).await {
            Err(error) if error.conflict() => Ok(None),
            other => Ok(Some(self.record_renewal(other?.object()?, began))),
        }
    }

    fn new_lease(&self, old: Option<&Lease>) -> Lease {
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
                lease_duration_seconds: self.timing.lease_duration_seconds(),
                acquire_time: now.clone(),
                renew_time: now,
                lease_transitions: Some(changes.saturating_add(i32::from(old.is_some()))),
                ..LeaseSpec::default()
            }),
        }
    }

    fn renewed_lease(&self, lease: &Lease) -> Lease {
        let mut next = lease.clone();
        if let Some(spec) = next.spec.as_mut() {
            spec.renew_time = self.now();
            // A Lease that was edited must not free itself before this candidate gives it up.
            spec.lease_duration_seconds = self.timing.lease_duration_seconds();
        }
        next
    }

    async fn with_timeout<T>(&self, request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let after = self.timing.request_timeout();
        let Ok(result) = tokio::time::timeout(after, request).await else {
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
        // To the microsecond, as the API server returns it.
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

fn lease_duration(lease: &Lease) -> Option<Duration> {
    let seconds = lease.spec.as_ref()?.lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

/// An unchanged Lease keeps the time at which it was first observed.
fn observe(old: Option<ObservedLease>, lease: Lease) -> ObservedLease {
    match old {
        Some(old) if old.lease.resource_version() == lease.resource_version() => old,
        _ => ObservedLease {
            lease,
            observed_at: Instant::now(),
        },
    }
}

#[cfg(test)]
mod tests;
