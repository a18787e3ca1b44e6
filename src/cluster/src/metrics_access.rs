//! Who may read metrics over HTTPS: the API server reviews each token, as it does for controller-runtime's servers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kruise_ops::secure_metrics::{Access, MetricsAccess};
use kube::api::ObjectMeta;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Error, error_chain, write};

/// How long an answer counts. Of a token that is not allowed it is short: somebody may just be allowing it.
const fn lifetime(access: Access) -> Duration {
    match access {
        Access::Allowed => Duration::from_secs(60),
        _ => Duration::from_secs(10),
    }
}

/// Tokens whose answers are kept.
const MAX_ANSWERS: usize = 64;
/// Tokens that are reviewed at a time.
const MAX_REVIEWS: usize = 2;
/// Pause after a token that was not allowed, so that whoever reaches the port causes at most [`MAX_REVIEWS`] reviews a
/// second.
const REFUSAL_PAUSE: Duration = Duration::from_secs(1);

/// Asks the API server about each token: a TokenReview, then a SubjectAccessReview for the non-resource URL `/metrics`.
pub struct ReviewedAccess {
    client: Client,
    answers: Mutex<HashMap<String, (Access, Instant)>>,
    reviews: Semaphore,
}

impl ReviewedAccess {
    /// Reviews with this client.
    #[must_use]
    pub fn new(client: Client) -> Arc<Self> {
        Arc::new(Self {
            client,
            answers: Mutex::default(),
            reviews: Semaphore::new(MAX_REVIEWS),
        })
    }

    async fn check_token(&self, token: &str) -> Access {
        if let Some(access) = self.known_answer(token) {
            return access;
        }
        let Ok(_permit) = self.reviews.acquire().await else {
            return Access::Unknown;
        };
        // Another request with this token may have waited before this one.
        if let Some(access) = self.known_answer(token) {
            return access;
        }
        let access = self.review(token).await.unwrap_or_else(|why| {
            tracing::warn!(error = error_chain(&why), "cannot check who reads the metrics");
            Access::Unknown
        });
        if access != Access::Unknown {
            self.keep_answer(token, access);
        }
        if access != Access::Allowed {
            tokio::time::sleep(REFUSAL_PAUSE).await;
        }
        access
    }

    fn known_answer(&self, token: &str) -> Option<Access> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (access, given) = answers.get(token)?;
        (given.elapsed() < lifetime(*access)).then_some(*access)
    }

    fn keep_answer(&self, token: &str, access: Access) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.retain(|_, (access, given)| given.elapsed() < lifetime(*access));
        // Refused tokens are the first to go: anybody can send them.
        if answers.len() >= MAX_ANSWERS {
            answers.retain(|_, (access, _)| *access == Access::Allowed);
        }
        if answers.len() < MAX_ANSWERS {
            answers.insert(token.to_owned(), (access, Instant::now()));
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

impl MetricsAccess for ReviewedAccess {
    fn check<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Access> {
        Box::pin(self.check_token(token))
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
            assert_eq!(access.check(token).await, expected, "{token}");
            assert_eq!(count(), sent, "{token}");
        }
        tokio::time::advance(Duration::from_secs(11)).await;
        access.check("user-prometheus").await;
        assert_eq!(count(), 5);
        access.check("nobody").await;
        assert_eq!(count(), 6);
        tokio::time::advance(Duration::from_secs(60)).await;
        access.check("user-prometheus").await;
        assert_eq!(count(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn invalid_tokens_cause_two_reviews_a_second() {
        let (access, requests) = reviewed_access();
        access.check("user-prometheus").await;
        let start = Instant::now();
        let tokens: Vec<String> = (0..200).map(|number| format!("nobody-{number}")).collect();
        futures::future::join_all(tokens.iter().map(|token| access.check(token))).await;
        assert!(
            start.elapsed() >= Duration::from_secs(99),
            "{:?}",
            start.elapsed()
        );
        assert_eq!(requests.load(Ordering::Relaxed), 2 + 200);
        assert!(access.answers.lock().unwrap().len() <= MAX_ANSWERS);
    }

    #[tokio::test(start_paused = true)]
    async fn invalid_tokens_displace_no_allowed_one() {
        let (access, requests) = reviewed_access();
        access.check("user-prometheus").await;
        for number in 0..MAX_ANSWERS + 10 {
            access.keep_answer(&format!("nobody-{number}"), Access::Unauthorized);
        }
        let before = requests.load(Ordering::Relaxed);
        assert_eq!(access.check("user-prometheus").await, Access::Allowed);
        assert_eq!(requests.load(Ordering::Relaxed), before);
    }
}
