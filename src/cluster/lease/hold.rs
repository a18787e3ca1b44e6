//! Keeps a Lease that is ours: renewed every second, and given up at the end.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Election, Held, Lost, RENEW_DEADLINE, RENEW_EVERY, RETRY, holder, within};
use crate::cluster::{Error, write};
use crate::ops::progress::Step;

impl Election {
    /// Keeps the Lease until shutdown, when it is given up so that another one can take it at once. What it is
    /// doing is marked in `step`.
    ///
    /// # Errors
    /// When it is lost; whatever was done under it must stop at once.
    pub async fn hold(&self, mut held: Held, shutdown: CancellationToken, step: Step) -> Result<(), Lost> {
        loop {
            step.idle(Some(RENEW_EVERY));
            tokio::select! {
                () = shutdown.cancelled() => {
                    self.give_up(held.lease).await;
                    return Ok(());
                }
                // From the beginning of the last one: the time that slow answers take is not lost besides.
                () = tokio::time::sleep_until(held.since + RENEW_EVERY) => {}
            }
            step.now("renewing the Lease", RENEW_DEADLINE);
            self.renew(&mut held).await?;
        }
    }

    /// Renews until it succeeds, or until the deadline has passed since the last successful renewal began.
    async fn renew(&self, held: &mut Held) -> Result<(), Lost> {
        let mut last = "the API server did not answer".to_owned();
        let deadline = held.since + RENEW_DEADLINE;
        match tokio::time::timeout_at(deadline, self.try_renew(held, &mut last)).await {
            Ok(done) => done,
            Err(_) => Err(Lost::NotRenewed {
                name: self.name.clone(),
                last,
            }),
        }
    }

    async fn try_renew(&self, held: &mut Held, last: &mut String) -> Result<(), Lost> {
        let mut under_way = FuturesUnordered::new();
        loop {
            under_way.push(self.ask(held.lease.clone()));
            // A late one goes on, for its answer may be the next thing to come; it is not all that is waited for, since
            // its connection may be dead.
            let answered = tokio::time::timeout(RENEW_EVERY, under_way.next());
            let Ok(Some((began, answer))) = answered.await else {
                continue;
            };
            let error = match answer {
                Ok(lease) => {
                    *held = self.held(lease, began);
                    return Ok(());
                }
                Err(error) => error,
            };
            *last = error.to_string();
            if error.conflict() || error.not_found() {
                held.lease = self.look_again(held.lease.clone()).await?;
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Asks for one renewal; tells when that began.
    async fn ask(&self, lease: Lease) -> (Instant, Result<Lease, Error>) {
        let began = Instant::now();
        (began, write::replace(&self.api, &self.renewal(&lease)).await)
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

    async fn give_up(&self, mut lease: Lease) {
        if let Some(spec) = lease.spec.as_mut() {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
        }
        if let Err(error) = within(write::replace(&self.api, &lease)).await {
            tracing::debug!(lease = self.name, %error, "lease not given up");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::Api;
    use kube::client::Body;
    use tower::service_fn;

    use super::*;
    use crate::cluster::{Clock, Fence};
    use crate::ops::progress::Progress;

    /// What becomes of a Lease that is held for a minute, where the API server takes so long for each of the requests,
    /// in turn; without a number it never answers. And after how long it ended, and how many requests there were, with
    /// the one that gives it up.
    async fn a_minute(answers: &'static [Option<u64>]) -> (Result<(), Lost>, Duration, usize) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let server = service_fn(move |request: Request<Body>| {
            let at = counter.fetch_add(1, Ordering::SeqCst);
            async move {
                match answers[at % answers.len()] {
                    Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
                    None => std::future::pending().await,
                }
                let lease = request.into_body().collect().await.unwrap().to_bytes();
                Ok::<_, Infallible>(Response::new(Body::from(lease)))
            }
        });
        let election = Election {
            api: Api::namespaced(kube::Client::new(server, "default"), "default"),
            clock: Clock::new(),
            namespace: "default".to_owned(),
            name: "one".to_owned(),
            identity: "me".to_owned(),
            fence: Fence::closed(),
        };
        let began = Instant::now();
        let held = election.held(election.fresh(None), began);
        let end = CancellationToken::new();
        let minute = tokio::time::sleep(Duration::from_secs(60));
        let canceller = end.clone();
        tokio::spawn(async move {
            minute.await;
            canceller.cancel();
        });
        let step = Progress::default().waiting("leader election");
        let held = Box::pin(election.hold(held, end, step)).await;
        (held, began.elapsed(), asked.load(Ordering::SeqCst))
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_api_server_is_no_reason_to_lose_it() {
        for (answers, most) in [
            (&[Some(10)][..], 61),
            (&[Some(900)], 61),
            (&[Some(1100)], 121),
            (&[Some(1400)], 121),
        ] {
            let (held, _, asked) = a_minute(answers).await;
            assert!(held.is_ok(), "{answers:?}: {held:?}");
            assert!(asked <= most, "{answers:?}: asked {asked} times");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_connection_is_no_reason_to_lose_it() {
        let (held, ..) = a_minute(&[Some(10), None]).await;
        assert!(held.is_ok(), "{held:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn without_answers_it_is_lost_in_time() {
        for answers in [&[None][..], &[Some(2100)]] {
            let (held, after, asked) = a_minute(answers).await;
            assert!(
                matches!(held, Err(Lost::NotRenewed { .. })),
                "{answers:?}: {held:?}"
            );
            assert_eq!((after, asked), (RENEW_DEADLINE, 2), "{answers:?}");
        }
    }
}
