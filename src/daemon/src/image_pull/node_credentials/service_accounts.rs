//! Service accounts of jobs: what credential provider plugins get of them, and tokens in their names.
//!
//! In:  service accounts (by name), TokenRequests.
//! Out: tokens for the audience of a plugin, bound to this node. They are kept in memory only, and in no log or message.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::ObjectMeta;
use kube::{Api, Client};
use serde::Deserialize;
use tokio::time::timeout;

use super::account_key::AccountKey;
use super::call_locks::CallLocks;
use super::config::TokenCacheType;
use crate::image_pull::act::retry_without_secret;
use crate::image_pull::plan::AttemptRetry;
use kruise_api::node_image::ServiceAccountReference;
use kruise_cluster::write;

/// Seconds that a token is valid: the minimum of the API server.
const TOKEN_SECONDS: i64 = 600;
/// Longest time that is believed, should the API server grant more.
const MAX_VALIDITY: Duration = Duration::from_secs(3600);
/// Timeout of one request, as for a pull secret.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);
/// Tokens that are kept; the ones that end first go first.
const MAX_TOKENS: usize = 1000;
/// Maximum bytes of a token.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such service account.
    #[error("it does not exist")]
    Missing,
    /// No answer in time.
    #[error("the API server did not answer in time")]
    Timeout,
    /// No plugin expects such a token.
    #[error("its token has more than {MAX_TOKEN_BYTES} bytes")]
    TooLong,
    /// The API server refused, or could not be reached.
    #[error(transparent)]
    Api(#[from] kruise_cluster::Error),
}

impl Error {
    /// How an attempt that the registry rejects without the token is retried, if not as any other.
    pub fn retry(&self) -> Option<AttemptRetry> {
        match self {
            Self::Missing | Self::TooLong => None,
            Self::Timeout => Some(AttemptRetry::Prevented),
            Self::Api(error) => retry_without_secret(error),
        }
    }
}

/// What a plugin gets of a service account, without `Debug`: the token is a secret.
#[derive(Clone)]
pub struct PluginAccount {
    /// Its token.
    pub token: Arc<str>,
    /// The annotations that the plugin's configuration names.
    pub annotations: BTreeMap<String, String>,
    /// For whom the plugin's credentials are kept.
    pub key: AccountKey,
}

impl PluginAccount {
    /// The texts of `identity` identify the account.
    pub fn new<const N: usize>(
        identity: [&str; N],
        annotations: BTreeMap<String, String>,
        token: Arc<str>,
        cache_type: TokenCacheType,
    ) -> Self {
        let of_token = (cache_type == TokenCacheType::Token).then_some(&*token);
        let key = AccountKey::new(identity, &annotations, of_token);
        Self {
            token,
            annotations,
            key,
        }
    }
}

/// A service account as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct Account {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Another one of the same name has another.
    pub uid: String,
    /// All its annotations.
    pub annotations: BTreeMap<String, String>,
}

/// The part of a service account that is read.
#[derive(Deserialize)]
struct AccountObject {
    metadata: AccountMetadata,
}

#[derive(Deserialize)]
struct AccountMetadata {
    uid: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// Whose token it is, and for whom.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct TokenKey {
    namespace: String,
    name: String,
    uid: String,
    audience: String,
}

/// Tokens, each until it is replaced by a new one.
#[derive(Default)]
struct Tokens(HashMap<TokenKey, (Arc<str>, Instant)>);

impl Tokens {
    fn get(&self, key: &TokenKey, now: Instant) -> Option<Arc<str>> {
        let (token, end) = self.0.get(key)?;
        (now < *end).then(|| Arc::clone(token))
    }

    fn insert(&mut self, key: TokenKey, token: Arc<str>, end: Instant, now: Instant) {
        self.0.retain(|_, (_, end)| now < *end);
        if self.0.len() >= MAX_TOKENS {
            let first = self.0.iter().min_by_key(|(_, (_, end))| *end);
            if let Some(key) = first.map(|(key, _)| key.clone()) {
                self.0.remove(&key);
            }
        }
        self.0.insert(key, (token, end));
    }
}

/// How long a token is used: 80 % of its time, as in kubelet.
fn used_for(valid_for: Duration) -> Duration {
    valid_for.min(MAX_VALIDITY) / 5 * 4
}

/// Reads service accounts and keeps their tokens.
pub struct ServiceAccounts {
    client: Client,
    node_name: String,
    tokens: Mutex<Tokens>,
    requests: CallLocks<TokenKey>,
}

impl ServiceAccounts {
    /// No tokens yet; those of this client's API server are bound to the node.
    pub fn new(client: Client, node_name: &str) -> Self {
        Self {
            client,
            node_name: node_name.to_owned(),
            tokens: Mutex::default(),
            requests: CallLocks::default(),
        }
    }

    fn tokens(&self) -> MutexGuard<'_, Tokens> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a service account.
    pub async fn read(&self, reference: &ServiceAccountReference) -> Result<Account, Error> {
        let ServiceAccountReference { namespace, name } = reference;
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let read = write::get_partial::<ServiceAccount, AccountObject>(&api, &(), name);
        let found = timeout(REQUEST_TIMEOUT, read)
            .await
            .map_err(|_| Error::Timeout)??;
        let AccountMetadata { uid, annotations } = found.ok_or(Error::Missing)?.metadata;
        Ok(Account {
            namespace: namespace.clone(),
            name: name.clone(),
            uid,
            annotations,
        })
    }

    /// A token of the account for an audience.
    pub async fn token(&self, account: &Account, audience: &str) -> Result<Arc<str>, Error> {
        let key = TokenKey {
            namespace: account.namespace.clone(),
            name: account.name.clone(),
            uid: account.uid.clone(),
            audience: audience.to_owned(),
        };
        let lock = self.requests.get(&key);
        let _requesting = lock.lock().await;
        let begin = Instant::now();
        let known = self.tokens().get(&key, begin);
        if let Some(token) = known {
            return Ok(token);
        }
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &account.namespace);
        let token_request = token_request(account, audience, &self.node_name);
        let create = write::create_token(&api, &account.name, &token_request);
        let issued = timeout(REQUEST_TIMEOUT, create)
            .await
            .map_err(|_| Error::Timeout)??;
        if issued.token.len() > MAX_TOKEN_BYTES {
            return Err(Error::TooLong);
        }
        let token: Arc<str> = issued.token.into();
        let end = begin + used_for(issued.valid_for);
        self.tokens().insert(key, Arc::clone(&token), end, Instant::now());
        Ok(token)
    }
}

/// The request for a token that ends with this node, and is of this account and no later one of the same name.
fn token_request(account: &Account, audience: &str, node_name: &str) -> TokenRequest {
    TokenRequest {
        metadata: ObjectMeta {
            uid: Some(account.uid.clone()),
            ..ObjectMeta::default()
        },
        spec: TokenRequestSpec {
            audiences: vec![audience.to_owned()],
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node_name.to_owned()),
                uid: None,
            }),
            expiration_seconds: Some(TOKEN_SECONDS),
        },
        status: None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// Path and body of each request, in order.
    type Requests = Arc<Mutex<Vec<(String, Value)>>>;

    /// An API server with service accounts that have this annotation `role` and tokens `TOKEN-NAME`, each with the
    /// number of the request; returns what is requested, too. Accounts `missing` and `forbidden` are that.
    pub fn server(role: &str) -> (ServiceAccounts, Requests) {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (log, role) = (Arc::clone(&requests), role.to_owned());
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (log, role) = (Arc::clone(&log), role.clone());
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect_bytes().await.unwrap();
                let body: Value = serde_json::from_slice(&body).unwrap_or_default();
                let number = {
                    let mut log = log.lock().unwrap();
                    log.push((path.clone(), body.clone()));
                    log.len()
                };
                let name = path.split('/').nth(6).unwrap().to_owned();
                let (code, answer): (u16, Value) = match name.as_str() {
                    "missing" => (
                        404,
                        json!({ "kind": "Status", "code": 404, "reason": "NotFound" }),
                    ),
                    "forbidden" if path.ends_with("/token") => (
                        403,
                        json!({ "kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden", "message": "no" }),
                    ),
                    _ if path.ends_with("/token") => (
                        201,
                        json!({ "spec": { "expirationSeconds": body["spec"]["expirationSeconds"] },
                            "status": { "token": format!("TOKEN-{name}-{number}") } }),
                    ),
                    _ => (
                        200,
                        json!({ "metadata": { "name": name, "uid": format!("uid-{name}"), "annotations": { "role": role } } }),
                    ),
                };
                http::Response::builder()
                    .status(code)
                    .body(Body::from(answer.to_string().into_bytes()))
            }
        });
        let client = Client::new(service, "default");
        (ServiceAccounts::new(client, "node-1"), requests)
    }

    pub fn reference(namespace: &str, name: &str) -> ServiceAccountReference {
        ServiceAccountReference {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    #[tokio::test]
    async fn token_is_requested_once_for_an_audience() {
        let (accounts, requests) = server("r");
        let account = accounts.read(&reference("ns", "a")).await.unwrap();
        assert_eq!(account.uid, "uid-a");
        assert_eq!(account.annotations["role"], "r");
        let both = tokio::join!(accounts.token(&account, "x"), accounts.token(&account, "x"));
        let tokens = [both.0.unwrap(), both.1.unwrap()];
        assert!(tokens.iter().all(|token| **token == *"TOKEN-a-2"), "{tokens:?}");
        assert_eq!(&*accounts.token(&account, "y").await.unwrap(), "TOKEN-a-3");
        let other = Account {
            uid: "other".to_owned(),
            ..account.clone()
        };
        assert_eq!(&*accounts.token(&other, "x").await.unwrap(), "TOKEN-a-4");
        let requests = requests.lock().unwrap().clone();
        assert_eq!(requests[0].0, "/api/v1/namespaces/ns/serviceaccounts/a");
        let (path, body) = &requests[1];
        assert_eq!(path, "/api/v1/namespaces/ns/serviceaccounts/a/token");
        assert_eq!(body["metadata"], json!({ "uid": "uid-a" }));
        assert_eq!(
            body["spec"],
            json!({ "audiences": ["x"], "expirationSeconds": 600,
                "boundObjectRef": { "apiVersion": "v1", "kind": "Node", "name": "node-1" } })
        );
    }

    #[tokio::test]
    async fn failures_decide_how_the_attempt_is_retried() {
        let (accounts, _) = server("r");
        let missing = accounts.read(&reference("ns", "missing")).await.unwrap_err();
        assert_eq!(
            (missing.to_string().as_str(), missing.retry()),
            ("it does not exist", None)
        );
        let invalid = accounts.read(&reference("ns", "a/b")).await.unwrap_err();
        assert_eq!(invalid.retry(), None);
        let account = accounts.read(&reference("ns", "forbidden")).await.unwrap();
        let forbidden = accounts.token(&account, "x").await.err().unwrap();
        assert_eq!(forbidden.retry(), Some(AttemptRetry::Uncounted));
        assert_eq!(Error::Timeout.retry(), Some(AttemptRetry::Prevented));
    }

    #[test]
    fn tokens_are_kept_for_most_of_their_time() {
        let seconds = Duration::from_secs;
        assert_eq!(used_for(seconds(600)), seconds(480));
        assert_eq!(used_for(seconds(1_000_000)), seconds(2880));
        let key = |name: &str| TokenKey {
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            uid: String::new(),
            audience: String::new(),
        };
        let (mut tokens, now) = (Tokens::default(), Instant::now());
        tokens.insert(key("a"), "jwt".into(), now + seconds(480), now);
        let has = |tokens: &Tokens, after| tokens.get(&key("a"), now + seconds(after)).is_some();
        assert!(has(&tokens, 479) && !has(&tokens, 480));
        assert!(tokens.get(&key("b"), now).is_none());
        for n in 0..MAX_TOKENS {
            tokens.insert(key(&n.to_string()), "jwt".into(), now + seconds(1000), now);
        }
        assert_eq!(tokens.0.len(), MAX_TOKENS);
        assert!(!has(&tokens, 0), "it ends first");
        tokens.insert(key("a"), "jwt".into(), now + seconds(3000), now + seconds(1000));
        assert_eq!(tokens.0.len(), 1);
    }
}
