//! Keeps a Lease that is ours: renewed every second, and given up at the end.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Election, Held, Lost, RENEW_DEADLINE, RENEW_EVERY, RETRY, holder, within};
use crate::cluster::{Error, write};
use crate::ops::progress::Step;

/// The time that was written into a renewal, by which it is known again, and when it was sent.
type Sent = (Option<MicroTime>, Instant);

impl Election {
    /// Keeps the Lease until shutdown, when it is given up so that another one can take it at once. What it is
    /// doing is marked in `step`.
    ///
    /// # Errors
    /// When it is lost; whatever was done under it must stop at once.
    pub async fn hold(&self, mut held: Held, shutdown: CancellationToken, step: Step) -> Result<(), Lost> {
        let ended = loop {
            step.idle(Some(RENEW_EVERY));
            let renewed = async {
                // From the beginning of the last one: the time that slow answers take is not lost besides.
                tokio::time::sleep_until(held.since + RENEW_EVERY).await;
                step.now("renewing the Lease", RENEW_DEADLINE);
                self.renew(&mut held).await
            };
            match shutdown.run_until_cancelled(Box::pin(renewed)).await {
                Some(Ok(())) => {}
                Some(Err(lost)) => break Err(lost),
                None => break Ok(()),
            }
        };
        self.fence.move_to(Instant::now());
        if ended.is_ok() {
            self.give_up(held.lease).await;
        }
        ended
    }

    /// Renews until it succeeds, or until the deadline has passed since the last successful renewal began. A late try
    /// goes on, for its answer may be the next thing to come; it is not all that is waited for, since its connection
    /// may be dead.
    async fn renew(&self, held: &mut Held) -> Result<(), Lost> {
        let mut last = "the API server did not answer".to_owned();
        let (mut next, deadline) = (Instant::now(), held.since + RENEW_DEADLINE);
        let (mut sent, mut tries) = (Vec::new(), FuturesUnordered::new());
        loop {
            tokio::select! {
                biased;
                Some(answer) = tries.next() => match answer? {
                    Ok(Held { lease, since }) => {
                        *held = self.held(lease, since);
                        return Ok(());
                    }
                    Err(error) => {
                        last = Error::to_string(&error);
                        next = next.min(Instant::now() + RETRY);
                    }
                },
                () = tokio::time::sleep_until(deadline) => {
                    let name = self.name.clone();
                    return Err(Lost::NotRenewed { name, last });
                }
                () = tokio::time::sleep_until(next) => {
                    let renewal = self.renewal(&held.lease);
                    sent.push((renew_time(&renewal).cloned(), Instant::now()));
                    tries.push(self.ask(renewal, sent.clone()));
                    next = Instant::now() + RENEW_EVERY;
                }
            }
        }
    }

    /// Asks for a renewal. Where the Lease is another than that was made for, it is looked at: one of those that were
    /// `sent` may have come through, though we have not heard of it; or else it is asked for again.
    async fn ask(&self, renewal: Lease, sent: Vec<Sent>) -> Result<Result<Held, Error>, Lost> {
        match self.put(&renewal).await {
            Err(error) if error.conflict() || error.not_found() => {
                let lease = self.look_again(renewal).await?;
                match sent.iter().find(|(time, _)| time.as_ref() == renew_time(&lease)) {
                    Some(&(_, since)) => Ok(Ok(Held { lease, since })),
                    None => Ok(self.put(&self.renewal(&lease)).await),
                }
            }
            answer => Ok(answer),
        }
    }

    async fn put(&self, renewal: &Lease) -> Result<Held, Error> {
        let since = Instant::now();
        let lease = write::replace(&self.api, renewal).await?;
        Ok(Held { lease, since })
    }

    async fn look_again(&self, old: Lease) -> Result<Lease, Lost> {
        match within(write::get(&self.api, &self.name)).await {
            Ok(Some(lease)) if holder(&lease) == Some(&self.identity) => Ok(lease),
            Ok(Some(lease)) => Err(Lost::Taken {
                name: self.name.clone(),
                by: holder(&lease).cloned().unwrap_or_default(),
            }),
            Ok(None) => within(write::create(&self.api, &self.fresh(None)))
                .await
                .or(Ok(old)),
            Err(_) => Ok(old),
        }
    }

    /// Gives the Lease up; once more where a renewal that was under way came between.
    async fn give_up(&self, mut lease: Lease) {
        for _ in 0..2 {
            if let Some(spec) = lease.spec.as_mut() {
                spec.holder_identity = Some(String::new());
                spec.lease_duration_seconds = Some(1);
            }
            let Err(error) = within(write::replace(&self.api, &lease)).await else {
                return;
            };
            tracing::debug!(lease = self.name, %error, "lease not given up");
            match within(write::get(&self.api, &self.name)).await {
                Ok(Some(now)) if error.conflict() && holder(&now) == Some(&self.identity) => lease = now,
                _ => return,
            }
        }
    }
}

fn renew_time(lease: &Lease) -> Option<&MicroTime> {
    lease.spec.as_ref()?.renew_time.as_ref()
}

#[cfg(test)]
mod tests;
