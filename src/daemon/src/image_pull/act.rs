//! One attempt to pull one image, and reading of its pull secrets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ObjectReference, Secret};
use kube::{Api, Client, ResourceExt};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use super::disk;
use super::plan::keyring::{Credentials, HelpersIgnored, KEY_CFG, KEY_JSON, Keyring};
use super::plan::{AttemptResult, AttemptRetry, PullProgress};
use kruise_api::image_reference::ImageReference;
use kruise_api::keys::SECRET_REFERENCES;
use kruise_cluster::write;
use kruise_cri::{AuthConfig, Error, Image, PullCause, PullRequest, Runtime};
use kruise_ops::traces::{Span, SpanContext};

/// Interval between reads of the progress while a client watches it: containerd has no event for it.
const WATCHED_PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between reads of the progress otherwise; it equals the interval at which the status is written for it.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout for reading the pull secrets of one tag. The attempt occupies its slot meanwhile.
pub(super) const SECRETS_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for reading one pull secret, shorter than that of a connection. After it the API server is not called for
/// the remaining ones.
const SECRET_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum bytes of Docker configuration that are used for one tag: what one Secret may hold. Each namespace with pull
/// secrets has at least an equal share. The number of namespaces is not bounded.
const MAX_SECRET_BYTES: usize = 1 << 20;
/// Maximum number of credentials that are tried for one image in one attempt, each with requests to the registry.
const MAX_CREDENTIALS: usize = 100;
/// Errors of the registry in one attempt after which no namespace's credentials are tried any more: each may take as
/// long as a connection or a layer, and the registry itself may be what fails.
const MAX_REGISTRY_ERRORS: usize = 4;
/// Maximum number of unusable Secrets that a message names.
const MAX_PROBLEMS: usize = 5;

/// The input of one attempt.
#[derive(Debug, Clone)]
pub struct PullAttempt {
    /// Fully qualified reference.
    pub image: String,
    /// Pull although the image is present.
    pub always: bool,
    /// Timeout of the whole attempt.
    pub timeout: Duration,
    /// Credentials to try in order; an empty list means an anonymous pull.
    pub credentials: Vec<SourcedCredentials>,
    /// Try without credentials in the end, because one of several owners has none: those of another one may be wrong.
    pub anonymous: bool,
    /// Labels for the runtime's sandbox configuration.
    pub labels: BTreeMap<String, String>,
    /// Annotations for the runtime's sandbox configuration.
    pub annotations: BTreeMap<String, String>,
    /// Whether the pull ends if the image cannot fit on the node.
    pub check_disk: bool,
    /// The span of the attempt, if there are traces.
    pub span: Option<SpanContext>,
}

impl PullAttempt {
    /// What to authenticate with, in order.
    fn logins(&self) -> VecDeque<Login> {
        let mut logins: VecDeque<_> = self.credentials.iter().map(Login::new).collect();
        if logins.is_empty() || self.anonymous {
            logins.push_back(Login::default());
        }
        logins
    }
}

/// Credentials, and where they come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourcedCredentials {
    /// What to authenticate with.
    pub credentials: Credentials,
    /// All sources that have them, each once.
    pub sources: Vec<CredentialSource>,
}

impl SourcedCredentials {
    /// Credentials of the node.
    #[must_use]
    pub fn of_node(credentials: Credentials) -> Self {
        Self {
            credentials,
            sources: vec![CredentialSource::Node],
        }
    }
}

/// Where credentials come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialSource {
    /// Pull secrets and service accounts of jobs in this namespace.
    Namespace(String),
    /// The node itself, or the configuration of its user.
    Node,
}

/// What one call authenticates with.
#[derive(Debug, Default)]
struct Login {
    /// `None` pulls anonymously.
    auth: Option<AuthConfig>,
    sources: Vec<CredentialSource>,
}

impl Login {
    fn new(found: &SourcedCredentials) -> Self {
        Self {
            auth: Some(cri_auth(&found.credentials)),
            sources: found.sources.clone(),
        }
    }
}

/// The image is on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledImage {
    /// `NAME@ID`, if the runtime reported it.
    pub image_id: Option<String>,
    /// The image was already on the node.
    pub already_present: bool,
    /// A note for the user although the pull succeeded.
    pub note: Option<String>,
}

/// Why the image is not on the node.
#[derive(Debug, Clone)]
pub struct PullFailure {
    /// The runtime's error; with several credentials, the one for the last of them.
    pub error: Error,
    /// Whether the runtime answered and the pull was requested.
    pub pull_started: bool,
}

/// Runs the attempt and reports progress, more often while `watched`. Dropping the future cancels the pull in the
/// runtime.
///
/// # Errors
/// See [`PullFailure`].
pub async fn run_attempt(
    runtime: &dyn Runtime,
    attempt: &PullAttempt,
    watched: impl Fn() -> bool + Send,
    mut on_progress: impl FnMut(PullProgress) + Send,
) -> Result<PulledImage, PullFailure> {
    let deadline = Instant::now() + attempt.timeout;
    let mut pull_started = false;
    let pull = async {
        if attempt.always {
            runtime.version().await?;
        } else if let Some(image) = runtime.image_status(&attempt.image).await? {
            return Ok(pulled_image(&attempt.image, Some(image), true));
        }
        pull_started = true;
        pull_with_credentials(runtime, attempt, deadline, &watched, &mut on_progress).await?;
        // The pull succeeded; an unavailable ID is not a failure.
        let image = runtime.image_status(&attempt.image).await.ok().flatten();
        Ok(pulled_image(&attempt.image, image, false))
    };
    let result = timeout_at(deadline, pull).await.unwrap_or_else(|_| {
        Err(Error::Timeout {
            socket: runtime.socket().to_owned(),
            method: "PullImage",
            after: attempt.timeout,
        })
    });
    result.map_err(|error| PullFailure { error, pull_started })
}

/// The image, if it is known to be on the node.
pub async fn present_image(runtime: &dyn Runtime, image: &str, timeout: Duration) -> Option<PulledImage> {
    let status = tokio::time::timeout(timeout, runtime.image_status(image)).await;
    let found = status.ok()?.ok()??;
    Some(pulled_image(image, Some(found), true))
}

fn pulled_image(name: &str, image: Option<Image>, already_present: bool) -> PulledImage {
    let platform = image.as_ref().and_then(|i| i.platform.clone());
    PulledImage {
        image_id: image.and_then(|i| image_id(name, &i.id)),
        already_present,
        note: platform.and_then(|p| platform_note(&p)),
    }
}

/// The note on an image for a different platform. A runtime rejects such an image only if an index offers a choice; an
/// image with a single platform is always pulled, and may even run, through an emulator.
fn platform_note(platform: &str) -> Option<String> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    };
    let node_platform = format!("{}/{architecture}", std::env::consts::OS);
    (platform != node_platform).then(|| format!("the image is for {platform}, this node is {node_platform}"))
}

async fn pull_with_credentials(
    runtime: &dyn Runtime,
    attempt: &PullAttempt,
    deadline: Instant,
    watched: &(impl Fn() -> bool + Send),
    on_progress: &mut (impl FnMut(PullProgress) + Send),
) -> Result<(), Error> {
    let mut logins = attempt.logins();
    let mut registry_errors = 0;
    while let Some(Login { auth, sources }) = logins.pop_front() {
        let mut span = Span::of_call("PullImage", attempt.span)
            .with("rpc.system", "grpc")
            .with("rpc.service", "runtime.v1.ImageService");
        let request = PullRequest {
            image: attempt.image.clone(),
            traceparent: span.context().map(|span| span.traceparent()),
            auth,
            labels: attempt.labels.clone(),
            annotations: attempt.annotations.clone(),
            timeout: deadline.saturating_duration_since(Instant::now()),
        };
        let pulled = pull_once(runtime, &request, attempt.check_disk, watched, on_progress).await;
        let Err(error) = pulled else { return Ok(()) };
        span.fail(&error.to_string());
        registry_errors += usize::from(is_of_registry(&error));
        retain_helpful(&mut logins, &sources, &error, registry_errors);
        if logins.is_empty() {
            return Err(error);
        }
    }
    Ok(())
}

/// Removes from the remaining logins those that cannot change this result, which one from `sources` had. A registry may
/// answer anything to credentials of the wrong form: after its errors, those of other sources are tried, and an
/// anonymous pull if that is to follow.
fn retain_helpful(
    remaining: &mut VecDeque<Login>,
    sources: &[CredentialSource],
    error: &Error,
    registry_errors: usize,
) {
    if other_credentials_may_help(error) {
        return;
    }
    if !is_of_registry(error) {
        remaining.clear();
        return;
    }
    remaining.retain_mut(|login| {
        login.sources.retain(|source| {
            let may_be_tried = *source == CredentialSource::Node || registry_errors < MAX_REGISTRY_ERRORS;
            may_be_tried && !sources.contains(source)
        });
        login.auth.is_none() || !login.sources.is_empty()
    });
}

/// Whether the registry failed, for which the form of the credentials may be a reason.
fn is_of_registry(error: &Error) -> bool {
    matches!(
        error,
        Error::Pull {
            cause: PullCause::InvalidImage | PullCause::RegistryUnavailable,
            ..
        }
    )
}

/// Whether other credentials may change the result: registries report "not found" for what the user may not see.
fn other_credentials_may_help(error: &Error) -> bool {
    matches!(
        error,
        Error::Pull {
            cause: PullCause::Unauthorized | PullCause::NotFound | PullCause::Other | PullCause::Throttled,
            ..
        }
    )
}

/// Pulls the image and reports progress.
async fn pull_once(
    runtime: &dyn Runtime,
    request: &PullRequest,
    check_disk: bool,
    watched: &(impl Fn() -> bool + Send),
    on_progress: &mut (impl FnMut(PullProgress) + Send),
) -> Result<String, Error> {
    let pull = runtime.pull_image(request);
    tokio::pin!(pull);
    let mut ticks = interval(WATCHED_PROGRESS_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    let mut polled_at: Option<Instant> = None;
    let mut must_check_disk = check_disk;
    loop {
        let bytes = async {
            loop {
                let now = ticks.tick().await;
                let is_due = polled_at.is_none_or(|polled_at| now >= polled_at + PROGRESS_INTERVAL);
                if is_due || must_check_disk || watched() {
                    polled_at = Some(now);
                    let bytes = runtime.pull_progress(&request.image).await?;
                    if let Some(bytes) = bytes.filter(|_| std::mem::take(&mut must_check_disk)) {
                        disk::check(runtime, &request.image, bytes).await?;
                    }
                    return Ok(bytes);
                }
            }
        };
        tokio::select! {
            result = &mut pull => return result,
            bytes = bytes => match bytes {
                Ok(Some(bytes)) => on_progress(PullProgress { done: bytes.downloaded, total: bytes.total }),
                Ok(None) => {}
                // Returning cancels the pull.
                Err(error @ Error::Pull { .. }) => return Err(error),
                Err(error) => tracing::debug!(image = request.image, %error, "cannot read the progress of the pull"),
            },
        }
    }
}

fn cri_auth(credentials: &Credentials) -> AuthConfig {
    AuthConfig {
        username: credentials.username.clone(),
        password: credentials.password.clone(),
        identity_token: credentials.identity_token.clone(),
        registry_token: credentials.registry_token.clone(),
        ..AuthConfig::default()
    }
}

/// Upstream's format: the familiar name, an at sign, and the runtime's ID.
fn image_id(image: &str, id: &str) -> Option<String> {
    let reference = ImageReference::parse(image).ok()?;
    (!id.is_empty()).then(|| format!("{}@{id}", reference.familiar_name()))
}

/// Converts the result of an attempt to its result for the tag.
pub fn attempt_result(result: Result<PulledImage, PullFailure>, secrets: &PullSecrets) -> AttemptResult {
    let mut notes = secrets.problems.clone();
    match result {
        Ok(PulledImage {
            image_id,
            already_present: _,
            note,
        }) => {
            notes.extend(note);
            let note = (!notes.is_empty()).then(|| notes.join("; "));
            AttemptResult::Pulled { image_id, note }
        }
        Err(PullFailure {
            error,
            pull_started: begun,
        }) => {
            let retry = match &error {
                Error::Unreachable { .. } | Error::Timeout { .. } if !begun => AttemptRetry::Prevented,
                Error::Unreachable { .. } => AttemptRetry::Uncounted,
                error if other_credentials_may_help(error) => {
                    secrets.unread_retry.unwrap_or(AttemptRetry::Counted)
                }
                error if error.retryable() => AttemptRetry::Counted,
                _ => AttemptRetry::Never,
            };
            notes.extend(secrets.node_problems.iter().cloned());
            notes.push(error_message(&error));
            AttemptResult::Failed {
                message: notes.join("; "),
                retry,
            }
        }
    }
}

/// The error message for the user of the tag.
pub fn error_message(error: &Error) -> String {
    match error {
        Error::Timeout {
            method: "PullImage",
            after,
            ..
        } => {
            format!("the pull did not end within its {} s", after.as_secs_f64().ceil())
        }
        // The reader already knows the image.
        Error::Pull { cause, message, .. } => format!("{cause}: {message}"),
        other => other.to_string(),
    }
}

/// The credentials of a tag's jobs.
#[derive(Debug, Clone, Default)]
pub struct PullSecrets {
    /// The usable credentials, by the namespace of the jobs that brought them.
    keyrings: BTreeMap<String, Keyring>,
    /// What plugins returned for the service accounts of jobs, by their namespace; for the attempt's repository.
    account_credentials: BTreeMap<String, Vec<Credentials>>,
    /// Messages about the Secrets that cannot be used.
    pub problems: Vec<String>,
    /// Why credentials of the node may be missing, for the message of a pull that fails.
    pub node_problems: Vec<String>,
    /// How an attempt that the registry rejects is retried if a Secret could not be read, so that credentials may be
    /// missing.
    pub unread_retry: Option<AttemptRetry>,
}

impl PullSecrets {
    /// The credentials to try for `repository`, in order: one of each namespace in turn, starting with
    /// `first_namespace`, so that no namespace has to wait for all credentials of a different one. Empty means an
    /// anonymous pull.
    pub fn credentials(&self, repository: &str, first_namespace: &str) -> Vec<SourcedCredentials> {
        let (own, others): (Vec<_>, Vec<_>) = self
            .namespaces()
            .into_iter()
            .partition(|namespace| *namespace == first_namespace);
        let all = own.into_iter().chain(others);
        let mut lists: Vec<_> = all
            .map(|namespace| {
                let source = CredentialSource::Namespace(namespace.to_owned());
                (source, self.credentials_of(namespace, repository).into_iter())
            })
            .collect();
        let mut merged: Vec<SourcedCredentials> = Vec::new();
        loop {
            let next = |(source, list): &mut (CredentialSource, std::vec::IntoIter<Credentials>)| {
                Some((source.clone(), list.next()?))
            };
            let round: Vec<_> = lists.iter_mut().filter_map(next).collect();
            if round.is_empty() || merged.len() >= MAX_CREDENTIALS {
                merged.truncate(MAX_CREDENTIALS);
                return merged;
            }
            for (source, credentials) in round {
                match merged.iter_mut().find(|found| found.credentials == credentials) {
                    Some(found) if found.sources.contains(&source) => {}
                    Some(found) => found.sources.push(source),
                    None => merged.push(SourcedCredentials {
                        credentials,
                        sources: vec![source],
                    }),
                }
            }
        }
    }

    /// The namespaces of jobs that may have brought credentials.
    fn namespaces(&self) -> BTreeSet<&str> {
        let namespaces = self.keyrings.keys().chain(self.account_credentials.keys());
        namespaces.map(String::as_str).collect()
    }

    /// The credentials of one namespace: of pull secrets, then of service accounts, as kubelet tries them.
    fn credentials_of(&self, namespace: &str, repository: &str) -> Vec<Credentials> {
        let keyring = self.keyrings.get(namespace);
        let mut found = keyring
            .map(|keyring| keyring.lookup(repository))
            .unwrap_or_default();
        found.extend(
            self.account_credentials
                .get(namespace)
                .into_iter()
                .flatten()
                .cloned(),
        );
        found
    }

    /// Adds what plugins returned for a service account of that namespace, for the attempt's repository.
    pub fn add_account_credentials(&mut self, namespace: String, credentials: Vec<Credentials>) {
        let of_namespace = self.account_credentials.entry(namespace).or_default();
        of_namespace.extend(credentials);
    }

    /// Whether one of these jobs has brought no credentials for `repository`, unlike others. Those for other registries
    /// do not count: alone, the job would pull without credentials.
    pub fn is_public_for(&self, repository: &str, owners: &[ObjectReference]) -> bool {
        let with_credentials: BTreeSet<&str> = self
            .namespaces()
            .into_iter()
            .filter(|namespace| !self.credentials_of(namespace, repository).is_empty())
            .collect();
        // Those of an old manager serve all.
        if with_credentials.is_empty() || with_credentials.contains("") {
            return false;
        }
        let mut namespaces = owners
            .iter()
            .map(|owner| owner.namespace.as_deref().unwrap_or_default());
        namespaces.any(|namespace| !with_credentials.contains(namespace))
    }

    /// Adds the credentials of a Secret.
    fn add_secret(&mut self, secret: &PullSecret) -> Result<Option<HelpersIgnored>, String> {
        let value = |key: &str| secret.data.get(key).map(|value| value.0.as_slice());
        let keyring = self.keyrings.entry(secret.job_namespace.clone()).or_default();
        keyring
            .add_secret(&secret.type_, value)
            .map_err(|e| e.to_string())
    }

    fn add_problem(&mut self, title: &str, text: &str) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(format!("pull secret {title}{text}"));
        }
    }
}

/// A Secret that was read, reduced to the used keys.
struct PullSecret {
    /// The namespace of the jobs that brought it.
    job_namespace: String,
    /// Namespace and name of the Secret.
    full_name: String,
    type_: String,
    data: BTreeMap<String, ByteString>,
}

impl PullSecret {
    fn new(secret: Secret, job_namespace: String, full_name: String) -> Self {
        let mut data = secret.data.unwrap_or_default();
        data.retain(|key, _| [KEY_JSON, KEY_CFG].contains(&key.as_str()));
        Self {
            job_namespace,
            full_name,
            type_: secret.type_.unwrap_or_else(|| "Opaque".to_owned()),
            data,
        }
    }

    fn bytes(&self) -> usize {
        self.data.values().map(|value| value.0.len()).sum()
    }
}

/// Removes what exceeds the maximum: as long as the total is too large, the largest Secret of the namespace that has
/// the most bytes. The bytes of a namespace are unknown until its Secrets are read.
fn remove_oversized(all: &mut Vec<PullSecret>) -> Vec<PullSecret> {
    let mut removed = Vec::new();
    loop {
        let mut namespaces: BTreeMap<&str, usize> = BTreeMap::new();
        for found in &*all {
            *namespaces.entry(&found.job_namespace).or_default() += found.bytes();
        }
        if namespaces.values().sum::<usize>() <= MAX_SECRET_BYTES {
            return removed;
        }
        let largest = namespaces.iter().max_by_key(|(_, bytes)| **bytes);
        let Some(largest_namespace) = largest.map(|(namespace, _)| (*namespace).to_owned()) else {
            return removed;
        };
        let candidates = all
            .iter()
            .enumerate()
            .filter(|(_, found)| found.job_namespace == largest_namespace);
        let Some((longest, _)) = candidates.max_by_key(|(_, found)| found.bytes()) else {
            return removed;
        };
        removed.push(all.remove(longest));
    }
}

/// Reads the Secrets of a tag.
pub async fn read_secrets(
    client: &Client,
    names: &[(String, String)],
    owners: &[ObjectReference],
) -> PullSecrets {
    let mut secrets = PullSecrets::default();
    let mut all = Vec::new();
    let deadline = Instant::now() + SECRETS_TIMEOUT;
    let mut unreachable = false;
    for (namespace, name) in names {
        if unreachable {
            break;
        }
        let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
        let full_name = format!("{namespace}/{name}");
        let secret_deadline = deadline.min(Instant::now() + SECRET_TIMEOUT);
        let why = match timeout_at(secret_deadline, write::get(&api, name)).await {
            Ok(Ok(Some(secret))) => {
                let Some(job_namespace) = job_namespace_of(&secret, owners) else {
                    continue;
                };
                all.push(PullSecret::new(secret, job_namespace, full_name));
                for oversized in remove_oversized(&mut all) {
                    let text = format!(
                        " is not used: the pull secrets of this image are longer than {MAX_SECRET_BYTES} bytes, and \
                         this is the longest of the namespace that has the most"
                    );
                    secrets.add_problem(&oversized.full_name, &text);
                }
                continue;
            }
            Ok(Ok(None)) => "it does not exist".to_owned(),
            Ok(Err(error)) => {
                secrets.unread_retry = secrets.unread_retry.max(retry_without_secret(&error));
                format!("it cannot be read: {error}")
            }
            Err(_) => {
                unreachable = true;
                secrets.unread_retry = Some(AttemptRetry::Prevented);
                "the API server did not answer in time".to_owned()
            }
        };
        secrets.add_problem(&full_name, &format!(" cannot be used: {why}"));
    }
    for secret in &all {
        match secrets.add_secret(secret) {
            Ok(None) => {}
            Ok(Some(unused)) => secrets.add_problem(&secret.full_name, &format!(": {unused}")),
            Err(why) => secrets.add_problem(&secret.full_name, &format!(" cannot be used: {why}")),
        }
    }
    secrets
}

/// How an attempt that the registry rejects is retried if a Secret is missing because of this error.
pub(super) fn retry_without_secret(error: &kruise_cluster::Error) -> Option<AttemptRetry> {
    if !error.retryable() {
        return error.forbidden().then_some(AttemptRetry::Uncounted);
    }
    let has_answered = error.answered() || matches!(error, kruise_cluster::Error::Unreadable { .. });
    Some(if has_answered {
        AttemptRetry::SecretError
    } else {
        AttemptRetry::Prevented
    })
}

/// The namespace of the jobs that a Secret serves; `None` if none of them is an owner of the tag. Credentials belong to
/// the jobs that brought them: a copy that names its jobs serves only their tags, and one that names none serves all. A
/// NodeImage lists the Secrets of all jobs that use the image.
fn job_namespace_of(secret: &Secret, owners: &[ObjectReference]) -> Option<String> {
    let Some(references) = secret.annotations().get(SECRET_REFERENCES) else {
        return Some(String::new());
    };
    let is_named = |owner: &&ObjectReference| {
        let job = format!(
            "{}/{}",
            owner.namespace.as_deref().unwrap_or(""),
            owner.name.as_deref().unwrap_or("")
        );
        references.split(',').any(|reference| reference.trim() == job)
    };
    let owner = owners.iter().find(is_named)?;
    Some(owner.namespace.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn image_for_another_platform_is_noted() {
        let note = platform_note("linux/none").unwrap();
        assert!(
            note.contains("linux/none") && note.contains("this node is"),
            "{note}"
        );
        let node_platform = note.rsplit(' ').next().unwrap();
        assert_eq!(platform_note(node_platform), None);
    }

    #[test]
    fn pull_secret_copy_serves_the_jobs_it_names() {
        let owner = |name: &str| ObjectReference {
            namespace: Some("ns".to_owned()),
            name: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        let mut secret = Secret::default();
        assert!(
            job_namespace_of(&secret, &[]).is_some(),
            "a secret that names no job serves all"
        );
        secret
            .annotations_mut()
            .insert(SECRET_REFERENCES.to_owned(), "ns/a,ns/b".to_owned());
        assert_eq!(
            job_namespace_of(&secret, &[owner("x"), owner("b")]).as_deref(),
            Some("ns")
        );
        assert_eq!(
            (
                job_namespace_of(&secret, &[owner("x")]),
                job_namespace_of(&secret, &[])
            ),
            (None, None)
        );
    }

    /// A Secret that a job of that namespace brought, with these users for `r` and at least `bytes` bytes of text.
    fn secret_from(namespace: &str, users: &[String], bytes: usize) -> Secret {
        let entries = users.iter().enumerate();
        let entries: BTreeMap<_, _> = entries
            .map(|(n, user)| {
                let path = format!("r/{}", "a/".repeat(n));
                (path, serde_json::json!({ "username": user, "password": "x" }))
            })
            .collect();
        let config = serde_json::json!({ "auths": entries, "rest": "x".repeat(bytes) }).to_string();
        let secret = serde_json::json!({
            "metadata": { "annotations": { SECRET_REFERENCES: format!("{namespace}/job") } },
            "type": "kubernetes.io/dockerconfigjson", "data": {},
        });
        let mut secret: Secret = serde_json::from_value(secret).unwrap();
        let data = [(KEY_JSON.to_owned(), ByteString(config.into_bytes()))];
        secret.data = Some(data.into());
        secret
    }

    fn job(namespace: &str) -> ObjectReference {
        ObjectReference {
            namespace: Some(namespace.to_owned()),
            name: Some("job".to_owned()),
            ..ObjectReference::default()
        }
    }

    /// Reads all of these Secrets from an API server.
    async fn secrets_from(all: Vec<Secret>, owners: &[ObjectReference]) -> PullSecrets {
        let names: Vec<_> = (0..all.len()).map(|n| ("ns".to_owned(), n.to_string())).collect();
        let all = std::sync::Arc::new(all);
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let all = std::sync::Arc::clone(&all);
            async move {
                let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
                let mut secret = all[name.parse::<usize>().unwrap()].clone();
                secret.metadata.name = Some(name);
                let text = serde_json::to_vec(&secret).unwrap();
                Ok::<_, std::io::Error>(http::Response::new(kube::client::Body::from(text)))
            }
        });
        read_secrets(&Client::new(service, "default"), &names, owners).await
    }

    #[tokio::test]
    async fn large_pull_secrets_leave_room_for_other_namespaces() {
        let users = |name: &str| [name.to_owned()];
        let mut all: Vec<_> = (0..64)
            .map(|_| secret_from("large", &users("l"), 300 << 10))
            .collect();
        all.push(secret_from("small", &users("s"), 0));
        let secrets = secrets_from(all.clone(), &[job("large"), job("small")]).await;
        let names = |found: Vec<SourcedCredentials>| {
            let users = found.into_iter().map(|found| found.credentials.username);
            users.collect::<Vec<_>>()
        };
        assert_eq!(names(secrets.credentials("r/a", "small")), ["s", "l"]);
        assert_eq!(names(secrets.credentials("r/a", "large")), ["l", "s"]);
        assert_eq!(secrets.problems.len(), MAX_PROBLEMS, "{:?}", secrets.problems);
        assert!(
            secrets.problems[0].contains("longer than 1048576 bytes"),
            "{:?}",
            secrets.problems
        );
        // A single namespace has the whole budget.
        all.truncate(3);
        let secrets = secrets_from(all, &[job("large")]).await;
        assert!(secrets.problems.is_empty(), "{:?}", secrets.problems);
    }

    #[tokio::test]
    async fn namespaces_without_pull_secrets_use_no_budget() {
        let mut owners: Vec<_> = (0..100).map(|n| job(&format!("public-{n}"))).collect();
        owners.push(job("a"));
        owners.push(job("b"));
        let user = |name: &str| [name.to_owned()];
        let all = vec![
            secret_from("a", &user("a"), 900 << 10),
            secret_from("b", &user("b"), 100 << 10),
        ];
        let secrets = secrets_from(all, &owners).await;
        assert!(secrets.problems.is_empty(), "{:?}", secrets.problems);
        assert_eq!(secrets.credentials("r/a", "b").len(), 2);
        // A public image must not fail for them because of wrong credentials of others.
        let is_public_for = |owners: &[ObjectReference]| secrets.is_public_for("r/a", owners);
        assert!(is_public_for(&owners) && !is_public_for(&[job("a"), job("b")]));
        assert!(!PullSecrets::default().is_public_for("r/a", &owners));
        let attempt = |anonymous| PullAttempt {
            image: "r/a".to_owned(),
            always: false,
            timeout: Duration::ZERO,
            credentials: secrets.credentials("r/a", "b"),
            anonymous,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            check_disk: false,
            span: None,
        };
        let authenticated = |anonymous| {
            let logins = attempt(anonymous).logins().into_iter();
            logins.map(|login| login.auth.is_some()).collect::<Vec<_>>()
        };
        assert_eq!(authenticated(false), [true, true]);
        assert_eq!(authenticated(true), [true, true, false]);
    }

    /// A team gives each of its jobs the credentials of its own registry, also for public images of another one.
    #[tokio::test]
    async fn credentials_for_another_registry_do_not_prevent_an_anonymous_pull() {
        let user = |name: &str| [name.to_owned()];
        let all = vec![
            secret_from("own", &user("o"), 0),
            secret_from("wrong", &user("w"), 0),
        ];
        let mut secrets = secrets_from(all, &[job("own"), job("wrong")]).await;
        let owners = [job("own"), job("wrong")];
        assert!(!secrets.is_public_for("r/a", &owners), "both have credentials");
        let mut keyring = Keyring::default();
        let credentials = Credentials {
            username: "o".to_owned(),
            ..Credentials::default()
        };
        keyring.add("own.test", credentials);
        secrets.keyrings.insert("own".to_owned(), keyring);
        assert!(secrets.is_public_for("r/a", &owners));
        assert!(!secrets.is_public_for("r/a", &[job("wrong")]));
        assert!(
            !secrets.is_public_for("other.test/a", &owners),
            "as one job alone"
        );
        // Those of an old manager serve all, but only where they match.
        let wrong = secrets.keyrings.get("wrong").unwrap().clone();
        let own = secrets.keyrings.get("own").unwrap().clone();
        secrets.keyrings.insert(String::new(), own);
        assert!(secrets.is_public_for("r/a", &owners));
        secrets.keyrings.insert(String::new(), wrong);
        assert!(!secrets.is_public_for("r/a", &owners));
    }

    #[tokio::test]
    async fn namespace_within_its_share_keeps_its_pull_secrets() {
        let user = |name: &str| [name.to_owned()];
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let all = [
                secret_from("large", &user("l0"), 400 << 10),
                secret_from("large", &user("l1"), 500 << 10),
                secret_from("a", &user("a"), 300 << 10),
                secret_from("b", &user("b"), 300 << 10),
            ];
            let all = order.iter().map(|n| all[*n].clone()).collect();
            let secrets = secrets_from(all, &[job("large"), job("a"), job("b")]).await;
            let names: Vec<_> = secrets
                .credentials("r/a", "b")
                .into_iter()
                .map(|found| found.credentials.username)
                .collect();
            assert_eq!(names, ["b", "a", "l0"], "{order:?}");
            assert_eq!(secrets.problems.len(), 1, "{:?}", secrets.problems);
        }
    }

    #[tokio::test]
    async fn credentials_are_tried_round_robin_and_bounded() {
        let many: Vec<_> = (0..200).map(|n| format!("m{n}")).collect();
        let few = ["f0".to_owned(), "f1".to_owned()];
        let all = vec![secret_from("many", &many, 0), secret_from("few", &few, 0)];
        let secrets = secrets_from(all, &[job("many"), job("few")]).await;
        let repository = format!("r/{}", "a/".repeat(200));
        let credentials = secrets.credentials(&repository, "many");
        let users = credentials
            .iter()
            .map(|found| found.credentials.username.as_str());
        let first: Vec<_> = users.take(5).collect();
        // The most specific entry comes first.
        assert_eq!(first, ["m199", "f1", "m198", "f0", "m197"]);
        assert_eq!(credentials.len(), MAX_CREDENTIALS);
    }

    #[tokio::test(start_paused = true)]
    async fn unresponsive_api_server_gets_one_secret_request() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, std::io::Error>>()
        });
        let names: Vec<_> = (0..64).map(|n| ("ns".to_owned(), n.to_string())).collect();
        let started = Instant::now();
        let secrets = read_secrets(&Client::new(service, "default"), &names, &[]).await;
        assert_eq!(
            (started.elapsed(), secrets.unread_retry),
            (SECRET_TIMEOUT, Some(AttemptRetry::Prevented))
        );
        assert_eq!(secrets.problems.len(), 1);
    }

    fn unreachable() -> Error {
        Error::Unreachable {
            socket: "s".into(),
            method: "PullImage",
            why: "reset".to_owned(),
        }
    }

    fn pull_error(cause: PullCause) -> Error {
        Error::Pull {
            image: "i".to_owned(),
            cause,
            message: "no".to_owned(),
        }
    }

    fn retry_for(error: Error, pull_started: bool, unread_retry: Option<AttemptRetry>) -> AttemptRetry {
        let secrets = PullSecrets {
            unread_retry,
            ..PullSecrets::default()
        };
        match attempt_result(Err(PullFailure { error, pull_started }), &secrets) {
            AttemptResult::Failed { retry: again, .. } => again,
            pulled @ AttemptResult::Pulled { .. } => panic!("{pulled:?}"),
        }
    }

    fn namespace(name: &str) -> CredentialSource {
        CredentialSource::Namespace(name.to_owned())
    }

    /// The users to try after this error, the given number of the registry's, for credentials of namespace `a`.
    fn remaining_users(error: &Error, registry_errors: usize) -> Vec<String> {
        let login = |user: &str, sources: &[CredentialSource]| Login {
            auth: Some(AuthConfig {
                username: user.to_owned(),
                ..AuthConfig::default()
            }),
            sources: sources.to_vec(),
        };
        let (a, b) = (namespace("a"), namespace("b"));
        let mut logins: VecDeque<_> = [
            login("a", std::slice::from_ref(&a)),
            login("shared", &[a.clone(), b.clone()]),
            login("b", &[b]),
            login("node", &[CredentialSource::Node]),
            Login::default(),
        ]
        .into();
        retain_helpful(&mut logins, &[a], error, registry_errors);
        let user = |login: Login| {
            login
                .auth
                .map_or_else(|| "anonymous".to_owned(), |auth| auth.username)
        };
        logins.into_iter().map(user).collect()
    }

    #[test]
    fn error_of_the_registry_leaves_credentials_of_other_sources() {
        let all: &[&str] = &["a", "shared", "b", "node", "anonymous"];
        let of_others: &[&str] = &["shared", "b", "node", "anonymous"];
        let cases: [(PullCause, &[&str]); 6] = [
            (PullCause::Unauthorized, all),
            (PullCause::Other, all),
            // "400 Bad Request", "500 Internal Server Error".
            (PullCause::InvalidImage, of_others),
            (PullCause::RegistryUnavailable, of_others),
            (PullCause::DiskFull, &[]),
            (PullCause::WrongPlatform, &[]),
        ];
        for (cause, expected) in cases {
            assert_eq!(remaining_users(&pull_error(cause), 1), expected, "{cause}");
        }
        assert_eq!(remaining_users(&unreachable(), 1), [] as [&str; 0]);
        let last = remaining_users(&pull_error(PullCause::RegistryUnavailable), MAX_REGISTRY_ERRORS);
        assert_eq!(last, ["node", "anonymous"], "as for a job without credentials");
    }

    /// They belong to the jobs of their namespace, like those of pull secrets.
    #[tokio::test]
    async fn credentials_of_service_accounts_belong_to_their_namespace() {
        let users = |name: &str| [name.to_owned()];
        let mut secrets = secrets_from(vec![secret_from("a", &users("a"), 0)], &[job("a")]).await;
        let login = |user: &str| Credentials {
            username: user.to_owned(),
            ..Credentials::default()
        };
        secrets.add_account_credentials("a".to_owned(), vec![login("account-a")]);
        secrets.add_account_credentials("b".to_owned(), vec![login("account-b")]);
        secrets.add_account_credentials("none".to_owned(), Vec::new());
        let found = secrets.credentials("r/a", "b").into_iter();
        let found: Vec<_> = found
            .map(|found| (found.credentials.username, found.sources))
            .collect();
        let expected = [("account-b", "b"), ("a", "a"), ("account-a", "a")];
        let expected = expected.map(|(user, source)| (user.to_owned(), vec![namespace(source)]));
        assert_eq!(found, expected);
        assert!(!secrets.is_public_for("r/a", &[job("a"), job("b")]));
        assert!(secrets.is_public_for("r/a", &[job("b"), job("none")]));
    }

    #[tokio::test]
    async fn equal_credentials_of_two_namespaces_are_tried_once_for_both() {
        let user = |name: &str| [name.to_owned()];
        let all = vec![
            secret_from("a", &user("x"), 0),
            secret_from("b", &user("x"), 0),
            secret_from("b", &user("x"), 0),
        ];
        let secrets = secrets_from(all, &[job("a"), job("b")]).await;
        let found = secrets.credentials("r/a", "b");
        let sources: Vec<_> = found.into_iter().map(|found| found.sources).collect();
        assert_eq!(sources, [[namespace("b"), namespace("a")]]);
    }

    #[test]
    fn infrastructure_errors_do_not_count_as_attempts() {
        let timeout = || Error::Timeout {
            socket: "s".into(),
            method: "ImageStatus",
            after: Duration::from_secs(5),
        };
        let unread_retry = Some(AttemptRetry::Prevented);
        assert_eq!(retry_for(unreachable(), true, None), AttemptRetry::Uncounted);
        assert_eq!(retry_for(unreachable(), false, None), AttemptRetry::Prevented);
        assert_eq!(retry_for(timeout(), false, None), AttemptRetry::Prevented);
        assert_eq!(retry_for(timeout(), true, unread_retry), AttemptRetry::Counted);
        for cause in [PullCause::Unauthorized, PullCause::NotFound, PullCause::Throttled] {
            assert_eq!(
                retry_for(pull_error(cause), true, unread_retry),
                AttemptRetry::Prevented,
                "{cause}"
            );
            assert_eq!(
                retry_for(pull_error(cause), true, None),
                AttemptRetry::Counted,
                "{cause}"
            );
        }
        assert_eq!(
            retry_for(pull_error(PullCause::DiskFull), true, unread_retry),
            AttemptRetry::Counted
        );
        assert_eq!(
            retry_for(pull_error(PullCause::WrongPlatform), true, unread_retry),
            AttemptRetry::Never
        );
    }

    #[test]
    fn pull_secret_problems_precede_the_pull_error() {
        let secrets = PullSecrets {
            problems: vec!["secret x is missing".to_owned()],
            ..PullSecrets::default()
        };
        let error = Error::Timeout {
            socket: "s".into(),
            method: "PullImage",
            after: Duration::from_secs(5),
        };
        let AttemptResult::Failed { message, .. } = attempt_result(
            Err(PullFailure {
                error,
                pull_started: true,
            }),
            &secrets,
        ) else {
            panic!()
        };
        assert_eq!(
            message,
            "secret x is missing; the pull did not end within its 5 s"
        );
    }

    /// Reads one pull secret from an API server that answers with that code, or that is unreachable.
    async fn secrets_from_api_status(code: Option<u16>) -> PullSecrets {
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| async move {
            let Some(code) = code else {
                return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
            };
            let status = serde_json::json!({ "kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": "" });
            let body = kube::client::Body::from(status.to_string().into_bytes());
            Ok(http::Response::builder().status(code).body(body).unwrap())
        });
        let names = [("ns".to_owned(), "login".to_owned())];
        read_secrets(&Client::new(service, "default"), &names, &[]).await
    }

    #[tokio::test]
    async fn unreadable_secret_is_retried_unlike_a_missing_one() {
        for (code, unread) in [
            (None, Some(AttemptRetry::Prevented)),
            // The API server may be overloaded, or never be able to read this Secret.
            (Some(500), Some(AttemptRetry::SecretError)),
            (Some(429), Some(AttemptRetry::SecretError)),
            // A starting API server has not loaded the roles yet.
            (Some(403), Some(AttemptRetry::Uncounted)),
            (Some(404), None),
        ] {
            let secrets = secrets_from_api_status(code).await;
            assert_eq!(
                (secrets.unread_retry, secrets.problems.len()),
                (unread, 1),
                "{code:?}: {secrets:?}"
            );
        }
    }
}
