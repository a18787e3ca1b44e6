//! Renews a held Lease, and releases it at the end.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{Election, HeldLease, LeaseLost, holder};
use crate::retry::instant_after;
use crate::{Error, write};
use kruise_ops::progress::ProgressStep;

/// Timeout of one request to release the Lease: at shutdown the process has two seconds in total.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why one renewal failed.
enum RenewError {
    /// The Lease has a different holder.
    Lost(LeaseLost),
    /// A retry may succeed.
    Retryable(Error),
}

impl From<Error> for RenewError {
    fn from(error: Error) -> Self {
        Self::Retryable(error)
    }
}

impl Election {
    /// Renews the Lease until shutdown, and then releases it so that another replica can acquire it at once. The
    /// current activity is marked in `step`.
    ///
    /// # Errors
    /// When it is lost; all work under it must stop at once.
    pub async fn renew_until_shutdown(
        &self,
        mut held: HeldLease,
        shutdown: CancellationToken,
        step: ProgressStep,
    ) -> Result<(), LeaseLost> {
        let result = loop {
            step.set_idle(Some(self.timing.retry_period()));
            let renewed = async {
                sleep_until(instant_after(held.renewed_at, self.timing.retry_period())).await;
                step.set_activity("renewing the Lease", self.timing.renew_deadline());
                self.renew(&held).await
            };
            match shutdown.run_until_cancelled(Box::pin(renewed)).await {
                Some(Ok(renewed)) => held = renewed,
                Some(Err(lost)) => break Err(lost),
                None => break Ok(()),
            }
        };
        self.fence.set_deadline(Instant::now());
        if result.is_ok() {
            self.release(held.lease).await;
        }
        result
    }

    /// Retries until it succeeds, or until the deadline has passed since the last successful renewal began.
    async fn renew(&self, held: &HeldLease) -> Result<HeldLease, LeaseLost> {
        let after = self.timing.renew_deadline();
        let mut last = "the API server did not answer".to_owned();
        let attempts = async {
            loop {
                let started_at = Instant::now();
                match self.try_renew(&held.lease).await {
                    Ok(renewed) => return Ok(renewed),
                    Err(RenewError::Lost(lost)) => return Err(lost),
                    Err(RenewError::Retryable(error)) => {
                        tracing::debug!(lease = self.name, %error, "lease not renewed");
                        last = error.to_string();
                    }
                }
                sleep_until(instant_after(started_at, self.timing.retry_period())).await;
            }
        };
        if let Ok(ended) = timeout_at(instant_after(held.renewed_at, after), attempts).await {
            return ended.map(|held| self.record_renewal(held.lease, held.renewed_at));
        }
        let name = self.name.clone();
        Err(LeaseLost::NotRenewed { name, after, last })
    }

    /// Renews the Lease as it was; if it has changed and is still ours, as it is now: an earlier renewal may have
    /// succeeded without an answer.
    async fn try_renew(&self, lease: &Lease) -> Result<HeldLease, RenewError> {
        match self.write_renewal(lease).await {
            Err(error) if error.conflict() || error.not_found() => {}
            answer => return Ok(answer?),
        }
        match self.with_timeout(write::get(&self.api, &self.name)).await? {
            Some(lease) if holder(&lease) == Some(&self.identity) => Ok(self.write_renewal(&lease).await?),
            Some(lease) => Err(RenewError::Lost(LeaseLost::Taken {
                name: self.name.clone(),
                by: holder(&lease).cloned().unwrap_or_default(),
            })),
            None => {
                let since = Instant::now();
                let lease = self
                    .with_timeout(write::create(&self.api, &self.new_lease(None)))
                    .await?
                    .object()?;
                Ok(HeldLease {
                    lease,
                    renewed_at: since,
                })
            }
        }
    }

    async fn write_renewal(&self, lease: &Lease) -> Result<HeldLease, Error> {
        let since = Instant::now();
        let lease = self
            .with_timeout(write::replace(&self.api, &self.renewed_lease(lease)))
            .await?
            .object()?;
        Ok(HeldLease {
            lease,
            renewed_at: since,
        })
    }

    /// Releases the Lease; retries once if a renewal in flight came between.
    async fn release(&self, mut lease: Lease) {
        for _ in 0..2 {
            let mut released = self.renewed_lease(&lease);
            if let Some(spec) = released.spec.as_mut() {
                spec.holder_identity = Some(String::new());
                spec.lease_duration_seconds = Some(1);
            }
            match timeout(RELEASE_TIMEOUT, write::replace(&self.api, &released)).await {
                Ok(Ok(_)) => return,
                Ok(Err(error)) if error.conflict() => {}
                Ok(Err(error)) => return tracing::warn!(lease = self.name, %error, "lease not released"),
                Err(_) => {
                    return tracing::warn!(lease = self.name, after = ?RELEASE_TIMEOUT, "lease not released");
                }
            }
            match timeout(RELEASE_TIMEOUT, write::get(&self.api, &self.name)).await {
                Ok(Ok(Some(now))) if holder(&now) == Some(&self.identity) => lease = now,
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
