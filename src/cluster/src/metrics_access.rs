//! Who may read metrics over HTTPS: the API server reviews each token, as it does for controller-runtime's servers.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kruise_ops::http::client_network;
use kruise_ops::secure_metrics::{Access, MetricsAccess};
use kube::api::ObjectMeta;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Error, error_chain, write};

/// How long an answer counts. That of an allowed token is kubelet's own default. Of others it is short: its account may
/// just get the role.
const fn lifetime(access: Access) -> Duration {
    match access {
        Access::Allowed => Duration::from_secs(120),
        _ => Duration::from_secs(10),
    }
}

/// How long an allowed token stays allowed while the API server answers no review: that it does not is what metrics
/// should tell.
const ALLOWED_WITHOUT_ANSWER: Duration = Duration::from_secs(3600);
/// Tokens whose answers are kept.
const MAX_ANSWERS: usize = 64;
/// Networks whose tokens may wait for their review at a time, one each.
const MAX_WAITING: usize = 64;
/// Pause after a review of a token that is not allowed, before the next review: it limits how many requests the clients
/// of the port can cause at the API server.
const REFUSAL_PAUSE: Duration = Duration::from_secs(5);

/// Asks the API server about each token: a TokenReview, then a SubjectAccessReview for the non-resource URL `/metrics`.
pub struct ReviewedAccess {
    client: Client,
    state: Mutex<State>,
    /// One review at a time.
    reviewing: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    answers: HashMap<String, Answer>,
    /// Networks of clients whose token waits for its review.
    waiting: BTreeSet<IpAddr>,
    /// The last failure that was logged at a level that operators see.
    logged: Option<String>,
}

#[derive(Clone, Copy)]
struct Answer {
    access: Access,
    given: Instant,
}

impl Answer {
    fn is_fresh(self) -> bool {
        self.given.elapsed() < lifetime(self.access)
    }

    /// Whether it counts until the next review has ended.
    fn is_usable(self) -> bool {
        self.is_fresh() || (self.access == Access::Allowed && self.given.elapsed() < ALLOWED_WITHOUT_ANSWER)
    }
}

impl ReviewedAccess {
    /// Reviews with this client.
    #[must_use]
    pub fn new(client: Client) -> Arc<Self> {
        Arc::new(Self {
            client,
            state: Mutex::default(),
            reviewing: Arc::new(Semaphore::new(1)),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn check_token(self: Arc<Self>, token: String, peer: IpAddr) -> Access {
        let known = self.state().answers.get(&token).copied();
        if let Some(answer) = known.filter(|answer| answer.is_fresh()) {
            return answer.access;
        }
        let network = client_network(peer);
        let review = {
            let mut state = self.state();
            let may_wait = state.waiting.len() < MAX_WAITING && state.waiting.insert(network);
            may_wait.then(|| {
                let turn = Turn {
                    access: Arc::clone(&self),
                    network,
                };
                tokio::spawn(turn.review(token))
            })
        };
        // What is allowed does not wait: other clients could make it wait too long.
        if let Some(answer) = known.filter(|answer| answer.is_usable()) {
            return answer.access;
        }
        match review {
            // The review goes on if the client does not wait for it, and the next request finds the answer.
            Some(review) => review.await.unwrap_or(Access::Unknown),
            None => Access::Unknown,
        }
    }

    async fn review_and_keep(&self, token: &str) -> Access {
        let reviewed = self.review(token).await;
        let mut state = self.state();
        match reviewed {
            Ok(access) => {
                state.logged = None;
                state.keep(token, access);
                access
            }
            Err(why) => {
                let why = error_chain(&why);
                if state.logged.as_ref() == Some(&why) {
                    tracing::debug!(error = why, "cannot review the token of a client of the metrics");
                } else {
                    tracing::warn!(error = why, "cannot review the token of a client of the metrics");
                    state.logged = Some(why);
                }
                Access::Unknown
            }
        }
    }

    async fn review(&self, token: &str) -> Result<Access, Error> {
        let review = TokenReview {
            metadata: ObjectMeta::default(),
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: None,
            },
            status: None,
        };
        let reviewed = write::create_review(&Api::<TokenReview>::all(self.client.clone()), &review).await?;
        let status = reviewed.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated == Some(true));
        let Some(user) = user else {
            return Ok(Access::Unauthorized);
        };
        let review = access_review(user);
        let reviewed =
            write::create_review(&Api::<SubjectAccessReview>::all(self.client.clone()), &review).await?;
        let status = reviewed.status.unwrap_or_default();
        Ok(if status.allowed && status.denied != Some(true) {
            Access::Allowed
        } else {
            Access::Forbidden
        })
    }
}

/// A network's place among those that wait; drop gives it up, also after a panic.
struct Turn {
    access: Arc<ReviewedAccess>,
    network: IpAddr,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.access.state().waiting.remove(&self.network);
    }
}

impl Turn {
    /// Reviews a token after those that came before. It always ends: each request to the API server has a timeout.
    async fn review(self, token: String) -> Access {
        let access = &self.access;
        let Ok(permit) = Arc::clone(&access.reviewing).acquire_owned().await else {
            return Access::Unknown;
        };
        let known = access.state().answers.get(&token).copied();
        let reviewed = match known.filter(|answer| answer.is_fresh()) {
            // Another client of the same account.
            Some(answer) => answer.access,
            None => access.review_and_keep(&token).await,
        };
        if reviewed != Access::Allowed {
            // The client gets its answer at once; the next review waits for the permit.
            tokio::spawn(async move {
                tokio::time::sleep(REFUSAL_PAUSE).await;
                drop(permit);
            });
        }
        reviewed
    }
}

impl MetricsAccess for ReviewedAccess {
    fn check(self: Arc<Self>, token: String, peer: IpAddr) -> BoxFuture<'static, Access> {
        Box::pin(self.check_token(token, peer))
    }
}

impl State {
    fn keep(&mut self, token: &str, access: Access) {
        self.answers.retain(|_, answer| answer.is_usable());
        // Refused tokens are the first to go: any client can send them.
        if self.answers.len() >= MAX_ANSWERS {
            self.answers.retain(|_, answer| answer.access == Access::Allowed);
        }
        if self.answers.len() < MAX_ANSWERS || self.answers.contains_key(token) {
            let given = Instant::now();
            self.answers.insert(token.to_owned(), Answer { access, given });
        }
    }
}

/// Asks whether the user may get `/metrics`.
fn access_review(user: UserInfo) -> SubjectAccessReview {
    let UserInfo {
        extra,
        groups,
        uid,
        username,
    } = user;
    SubjectAccessReview {
        metadata: ObjectMeta::default(),
        spec: SubjectAccessReviewSpec {
            extra,
            groups,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some("/metrics".to_owned()),
                verb: Some("get".to_owned()),
            }),
            resource_attributes: None,
            uid,
            user: username,
        },
        status: None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// An API server that accepts tokens that begin with `user`, and lets `user-prometheus` read metrics.
    async fn answer(request: Request<Body>) -> Result<Response<Body>, std::convert::Infallible> {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let mut review: Value = serde_json::from_slice(&body).unwrap();
        review["status"] = match review["spec"]["token"].as_str() {
            Some(token) => {
                json!({ "authenticated": token.starts_with("user"), "user": { "username": token } })
            }
            None => json!({ "allowed": review["spec"]["user"] == "user-prometheus"
                && review["spec"]["nonResourceAttributes"] == json!({ "path": "/metrics", "verb": "get" }) }),
        };
        Ok(Response::new(Body::from(review.to_string().into_bytes())))
    }

    fn reviewed_access() -> (Arc<ReviewedAccess>, Arc<AtomicUsize>) {
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&requests);
        let service = tower::service_fn(move |request| {
            counted.fetch_add(1, Ordering::Relaxed);
            answer(request)
        });
        (ReviewedAccess::new(Client::new(service, "default")), requests)
    }

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    async fn check(access: &Arc<ReviewedAccess>, token: &str) -> Access {
        Arc::clone(access).check(token.to_owned(), PEER).await
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_kept_for_a_while() {
        let (access, requests) = reviewed_access();
        let count = || requests.load(Ordering::Relaxed);
        for (token, expected, sent) in [
            ("user-prometheus", Access::Allowed, 2),
            ("user-prometheus", Access::Allowed, 2),
            ("user-other", Access::Forbidden, 4),
            ("user-other", Access::Forbidden, 4),
            ("nobody", Access::Unauthorized, 5),
        ] {
            assert_eq!(check(&access, token).await, expected, "{token}");
            assert_eq!(count(), sent, "{token}");
        }
        tokio::time::sleep(lifetime(Access::Forbidden)).await;
        check(&access, "user-prometheus").await;
        assert_eq!(count(), 5);
        check(&access, "nobody").await;
        assert_eq!(count(), 6);
        // An allowed token is reviewed again while it is used.
        tokio::time::sleep(lifetime(Access::Allowed)).await;
        assert_eq!(check(&access, "user-prometheus").await, Access::Allowed);
        tokio::time::sleep(REFUSAL_PAUSE).await;
        assert_eq!(count(), 8);
    }

    /// Clients that go away do not make reviews more frequent.
    #[tokio::test(start_paused = true)]
    async fn invalid_tokens_are_reviewed_with_pauses() {
        let (access, requests) = reviewed_access();
        let (start, interval) = (Instant::now(), Duration::from_millis(10));
        for number in 0..6000_u32 {
            let peer = IpAddr::V4(std::net::Ipv4Addr::from_bits(number));
            let checked = Arc::clone(&access).check(format!("nobody-{number}"), peer);
            let _ = tokio::time::timeout(interval, checked).await;
            tokio::time::sleep(interval).await;
        }
        let expected = usize::try_from(start.elapsed().as_secs() / REFUSAL_PAUSE.as_secs()).unwrap();
        let sent = requests.load(Ordering::Relaxed);
        assert!(
            (expected - 1..=expected + 1).contains(&sent),
            "{sent}, not {expected}"
        );
        let state = access.state();
        assert!(state.waiting.len() <= MAX_WAITING && state.answers.len() <= MAX_ANSWERS);
    }

    #[tokio::test(start_paused = true)]
    async fn allowed_token_gets_its_turn_among_invalid_ones() {
        let (access, _) = reviewed_access();
        for number in 0..10_u32 {
            let peer = IpAddr::V4(std::net::Ipv4Addr::from_bits(number));
            tokio::spawn(Arc::clone(&access).check(format!("nobody-{number}"), peer));
        }
        tokio::task::yield_now().await;
        // Its client waits less long than its review.
        let scrape = Duration::from_secs(10);
        let first = tokio::time::timeout(scrape, check(&access, "user-prometheus")).await;
        assert!(first.is_err());
        tokio::time::sleep(REFUSAL_PAUSE * 10).await;
        assert_eq!(check(&access, "user-prometheus").await, Access::Allowed);
        // One address cannot take the turns of others.
        let (one, other) = tokio::join!(check(&access, "nobody-x"), check(&access, "nobody-y"));
        assert_eq!((one, other), (Access::Unauthorized, Access::Unknown));
        let in_network = |text: &str| client_network(text.parse().unwrap());
        assert_eq!(in_network("fd00::1:2:3:4"), in_network("fd00::4:3:2:1"));
        assert_ne!(in_network("fd00:0:0:1::1"), in_network("fd00::1"));
        assert_eq!(in_network("::ffff:10.0.0.1"), in_network("10.0.0.1"));
    }

    #[tokio::test(start_paused = true)]
    async fn allowed_token_outlasts_an_outage_of_the_api_server() {
        let is_down = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let down = Arc::clone(&is_down);
        let service = tower::service_fn(move |request| {
            let down = down.load(Ordering::Relaxed);
            async move {
                if down {
                    return Err(std::io::Error::other("connection refused"));
                }
                Ok(answer(request).await.unwrap())
            }
        });
        let access = ReviewedAccess::new(Client::new(service, "default"));
        assert_eq!(check(&access, "user-prometheus").await, Access::Allowed);
        is_down.store(true, Ordering::Relaxed);
        tokio::time::sleep(ALLOWED_WITHOUT_ANSWER - Duration::from_secs(60)).await;
        assert_eq!(check(&access, "user-prometheus").await, Access::Allowed);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(check(&access, "user-prometheus").await, Access::Unknown);
        is_down.store(false, Ordering::Relaxed);
        tokio::time::sleep(REFUSAL_PAUSE).await;
        assert_eq!(check(&access, "user-prometheus").await, Access::Allowed);
    }

    #[tokio::test(start_paused = true)]
    async fn invalid_tokens_displace_no_allowed_one() {
        let (access, requests) = reviewed_access();
        check(&access, "user-prometheus").await;
        for number in 0..MAX_ANSWERS + 10 {
            let mut state = access.state();
            state.keep(&format!("nobody-{number}"), Access::Unauthorized);
        }
        let before = requests.load(Ordering::Relaxed);
        assert_eq!(check(&access, "user-prometheus").await, Access::Allowed);
        assert_eq!(requests.load(Ordering::Relaxed), before);
    }
}
