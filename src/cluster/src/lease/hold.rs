//! Keeps a Lease that is ours: renewed, and released at the end.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{Election, Held, Lost, holder};
use crate::{Error, later, write};
use kruise_ops::progress::Step;

/// How long one request to release the Lease may take: a process that ends has two seconds in all.
const RELEASE: Duration = Duration::from_secs(1);

/// Why one renewal did not succeed.
enum Failed {
    /// The Lease is another's.
    Lost(Lost),
    /// It may succeed yet.
    For(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::For(error)
    }
}

impl Election {
    /// Keeps the Lease until shutdown, when it is released so that another one can take it at once. What it is
    /// doing is marked in `step`.
    ///
    /// # Errors
    /// When it is lost; whatever was done under it must stop at once.
    pub async fn hold(&self, mut held: Held, shutdown: CancellationToken, step: Step) -> Result<(), Lost> {
        let ended = loop {
            step.idle(Some(self.timing.retry_period()));
            let renewed = async {
                sleep_until(later(held.since, self.timing.retry_period())).await;
                step.now("renewing the Lease", self.timing.renew_deadline());
                self.renew(&held).await
            };
            match shutdown.run_until_cancelled(Box::pin(renewed)).await {
                Some(Ok(renewed)) => held = renewed,
                Some(Err(lost)) => break Err(lost),
                None => break Ok(()),
            }
        };
        self.fence.move_to(Instant::now());
        if ended.is_ok() {
            self.release(held.lease).await;
        }
        ended
    }

    /// Tries until it succeeds, or until the deadline has passed since the last successful renewal began.
    async fn renew(&self, held: &Held) -> Result<Held, Lost> {
        let after = self.timing.renew_deadline();
        let mut last = "the API server did not answer".to_owned();
        let tries = async {
            loop {
                let begun = Instant::now();
                match self.try_renew(&held.lease).await {
                    Ok(renewed) => return Ok(renewed),
                    Err(Failed::Lost(lost)) => return Err(lost),
                    Err(Failed::For(error)) => {
                        tracing::debug!(lease = self.name, %error, "lease not renewed");
                        last = error.to_string();
                    }
                }
                sleep_until(later(begun, self.timing.retry_period())).await;
            }
        };
        if let Ok(ended) = timeout_at(later(held.since, after), tries).await {
            return ended.map(|held| self.held(held.lease, held.since));
        }
        let name = self.name.clone();
        Err(Lost::NotRenewed { name, after, last })
    }

    /// Renews the Lease as it was; where it has changed, as it is, if it is still ours: an earlier renewal may have come
    /// through without an answer.
    async fn try_renew(&self, lease: &Lease) -> Result<Held, Failed> {
        match self.put(lease).await {
            Err(error) if error.conflict() || error.not_found() => {}
            answer => return Ok(answer?),
        }
        match self.within(write::get(&self.api, &self.name)).await? {
            Some(lease) if holder(&lease) == Some(&self.identity) => Ok(self.put(&lease).await?),
            Some(lease) => Err(Failed::Lost(Lost::Taken {
                name: self.name.clone(),
                by: holder(&lease).cloned().unwrap_or_default(),
            })),
            None => {
                let since = Instant::now();
                let lease = self
                    .within(write::create(&self.api, &self.fresh(None)))
                    .await?
                    .object()?;
                Ok(Held { lease, since })
            }
        }
    }

    async fn put(&self, lease: &Lease) -> Result<Held, Error> {
        let since = Instant::now();
        let lease = self
            .within(write::replace(&self.api, &self.renewal(lease)))
            .await?
            .object()?;
        Ok(Held { lease, since })
    }

    /// Releases the Lease; once more where a renewal that was under way came between.
    async fn release(&self, mut lease: Lease) {
        for _ in 0..2 {
            let mut released = self.renewal(&lease);
            if let Some(spec) = released.spec.as_mut() {
                spec.holder_identity = Some(String::new());
                spec.lease_duration_seconds = Some(1);
            }
            match timeout(RELEASE, write::replace(&self.api, &released)).await {
                Ok(Ok(_)) => return,
                Ok(Err(error)) if error.conflict() => {}
                Ok(Err(error)) => return tracing::warn!(lease = self.name, %error, "lease not released"),
                Err(_) => return tracing::warn!(lease = self.name, after = ?RELEASE, "lease not released"),
            }
            match timeout(RELEASE, write::get(&self.api, &self.name)).await {
                Ok(Ok(Some(now))) if holder(&now) == Some(&self.identity) => lease = now,
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
