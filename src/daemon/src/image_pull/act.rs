//! One attempt to get one image, and the Secrets for it.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ObjectReference, Secret};
use kube::{Api, Client, ResourceExt};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use super::plan::keyring::{Credentials, HelpersUnused, KEY_CFG, KEY_JSON, Keyring};
use super::plan::{Again, Ended, Progress};
use kruise_api::image_reference::Reference;
use kruise_api::keys::SECRET_REFERENCES;
use kruise_cluster::write;
use kruise_cri::{Auth, Error, Image, PullCause, PullRequest, Runtime};

/// How often bytes are asked for while somebody looks at them: containerd has no event for them.
const BYTES_WATCHED: Duration = Duration::from_secs(1);
/// How often they are asked for otherwise, which is as often as the status is written for them.
const BYTES_UNWATCHED: Duration = Duration::from_secs(10);
/// What reading the pull secrets of one tag may take. It has its slot meanwhile.
pub(super) const SECRETS: Duration = Duration::from_secs(30);
/// What reading one of them may take, less than a connection may. An API server that does not answer for so long is not
/// asked for the others.
const ONE_SECRET: Duration = Duration::from_secs(4);
/// Bytes of Docker configuration that are used for one tag: what one Secret may hold. Each namespace that brings some has
/// an equal share at least. Their number is not bounded.
const MAX_SECRET_BYTES: usize = 1 << 20;
/// Credentials that are tried for one image in one attempt, each with requests to the registry.
const MAX_TRIES: usize = 100;
/// Secrets that cannot be used and are named in a message.
const MAX_PROBLEMS: usize = 5;

/// What to do in one attempt.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// Fully qualified reference.
    pub image: String,
    /// Pull although the image is present.
    pub always: bool,
    /// The most that all of it may take.
    pub timeout: Duration,
    /// To be tried in order; none means anonymously.
    pub credentials: Vec<Credentials>,
    /// Labels for the runtime's sandbox configuration.
    pub labels: BTreeMap<String, String>,
    /// Annotations for the same.
    pub annotations: BTreeMap<String, String>,
}

/// The image is on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// `NAME@ID`, where the runtime said so.
    pub image_id: Option<String>,
    /// It was there already.
    pub present: bool,
    /// What its user should know all the same.
    pub note: Option<String>,
}

/// Why the image is not on the node.
#[derive(Debug, Clone)]
pub struct Failure {
    /// What the runtime said; where several credentials were tried, to the last of them.
    pub error: Error,
    /// Whether the runtime was there and was asked to pull.
    pub begun: bool,
}

/// Makes the attempt and tells of bytes meanwhile, often where `watched`. Dropping the future cancels the pull in the
/// runtime.
///
/// # Errors
/// See [`Failure`].
pub async fn attempt(
    runtime: &dyn Runtime,
    attempt: &Attempt,
    watched: impl Fn() -> bool + Send,
    mut tell: impl FnMut(Progress) + Send,
) -> Result<Pulled, Failure> {
    let deadline = Instant::now() + attempt.timeout;
    let mut begun = false;
    let work = async {
        if attempt.always {
            runtime.version().await?;
        } else if let Some(image) = runtime.image_status(&attempt.image).await? {
            return Ok(pulled(&attempt.image, Some(image), true));
        }
        begun = true;
        pull(runtime, attempt, deadline, &watched, &mut tell).await?;
        // The pull succeeded; that its ID cannot be learnt is no failure.
        let image = runtime.image_status(&attempt.image).await.ok().flatten();
        Ok(pulled(&attempt.image, image, false))
    };
    let ended = timeout_at(deadline, work).await.unwrap_or_else(|_| {
        Err(Error::Timeout {
            socket: runtime.socket().to_owned(),
            method: "PullImage",
            after: attempt.timeout,
        })
    });
    ended.map_err(|error| Failure { error, begun })
}

fn pulled(name: &str, image: Option<Image>, present: bool) -> Pulled {
    let platform = image.as_ref().and_then(|i| i.platform.clone());
    Pulled {
        image_id: image.and_then(|i| image_id(name, &i.id)),
        present,
        note: platform.and_then(|p| foreign(&p)),
    }
}

/// What to say of an image for another platform. A runtime refuses it only where an index gives it the choice; what
/// has one platform only is pulled whatever that is, and may even run, through an emulator.
fn foreign(platform: &str) -> Option<String> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    };
    let ours = format!("{}/{architecture}", std::env::consts::OS);
    (platform != ours).then(|| format!("the image is for {platform}, this node is {ours}"))
}

async fn pull(
    runtime: &dyn Runtime,
    attempt: &Attempt,
    deadline: Instant,
    watched: &(impl Fn() -> bool + Send),
    tell: &mut (impl FnMut(Progress) + Send),
) -> Result<(), Error> {
    let mut tries: Vec<Option<Auth>> = attempt.credentials.iter().map(|c| Some(auth(c))).collect();
    if tries.is_empty() {
        tries.push(None);
    }
    let mut tries = tries.into_iter().peekable();
    while let Some(auth) = tries.next() {
        let request = PullRequest {
            image: attempt.image.clone(),
            auth,
            labels: attempt.labels.clone(),
            annotations: attempt.annotations.clone(),
            timeout: deadline.saturating_duration_since(Instant::now()),
        };
        match pull_once(runtime, &request, watched, tell).await {
            Err(error) if tries.peek().is_some() && others_may_help(&error) => {}
            result => return result.map(|_| ()),
        }
    }
    Ok(())
}

/// Whether other credentials may change the outcome: registries hide what one may not see as "not found".
fn others_may_help(error: &Error) -> bool {
    matches!(
        error,
        Error::Pull {
            cause: PullCause::Unauthorized | PullCause::NotFound | PullCause::Other | PullCause::Throttled,
            ..
        }
    )
}

/// Pulls, and tells of bytes meanwhile.
async fn pull_once(
    runtime: &dyn Runtime,
    request: &PullRequest,
    watched: &(impl Fn() -> bool + Send),
    tell: &mut (impl FnMut(Progress) + Send),
) -> Result<String, Error> {
    let pull = runtime.pull_image(request);
    tokio::pin!(pull);
    let mut ticks = interval(BYTES_WATCHED);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    let mut asked: Option<Instant> = None;
    loop {
        let bytes = async {
            loop {
                let now = ticks.tick().await;
                if watched() || asked.is_none_or(|asked| now >= asked + BYTES_UNWATCHED) {
                    asked = Some(now);
                    return runtime.pull_progress(&request.image).await;
                }
            }
        };
        tokio::select! {
            result = &mut pull => return result,
            bytes = bytes => match bytes {
                Ok(Some(bytes)) => tell(Progress { done: bytes.done, total: bytes.total }),
                Ok(None) => {}
                Err(error) => tracing::debug!(image = request.image, %error, "no bytes"),
            },
        }
    }
}

fn auth(credentials: &Credentials) -> Auth {
    Auth {
        username: credentials.username.clone(),
        password: credentials.password.clone(),
        identity_token: credentials.identity_token.clone(),
        registry_token: credentials.registry_token.clone(),
        ..Auth::default()
    }
}

/// Upstream's form: the familiar name, an at sign, and the runtime's ID.
fn image_id(image: &str, id: &str) -> Option<String> {
    let reference = Reference::parse(image).ok()?;
    (!id.is_empty()).then(|| format!("{}@{id}", reference.familiar_name()))
}

/// What an attempt's result means for the tag.
pub fn ended(result: Result<Pulled, Failure>, secrets: &Secrets) -> Ended {
    let mut notes = secrets.problems.clone();
    match result {
        Ok(Pulled {
            image_id,
            present: _,
            note,
        }) => {
            notes.extend(note);
            let note = (!notes.is_empty()).then(|| notes.join("; "));
            Ended::Pulled { image_id, note }
        }
        Err(Failure { error, begun }) => {
            let again = match &error {
                Error::Unreachable { .. } | Error::Timeout { .. } if !begun => Again::Prevented,
                Error::Unreachable { .. } => Again::Uncounted,
                error if others_may_help(error) => secrets.unread.unwrap_or(Again::Counted),
                error if error.retryable() => Again::Counted,
                _ => Again::Never,
            };
            notes.push(words(&error));
            Ended::Failed {
                words: notes.join("; "),
                again,
            }
        }
    }
}

/// The error as the user of the tag should read it.
pub fn words(error: &Error) -> String {
    match error {
        Error::Timeout {
            method: "PullImage",
            after,
            ..
        } => {
            format!("the pull did not end within its {} s", after.as_secs_f64().ceil())
        }
        // Which image it is the reader knows.
        Error::Pull { cause, message, .. } => format!("{cause}: {message}"),
        other => other.to_string(),
    }
}

/// What the Secrets of a tag hold.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    /// What can be used, by the namespace of the jobs that brought it.
    keyrings: BTreeMap<String, Keyring>,
    /// What cannot, in words.
    pub problems: Vec<String>,
    /// How an attempt that the registry refuses is repeated where one of them could not be read, so that credentials may
    /// be missing.
    pub unread: Option<Again>,
}

impl Secrets {
    /// What to try for `repository`, in order: one of each namespace in turn, so that none has to wait for all of
    /// another's; `first` has the first turn. Nothing means anonymously.
    pub fn credentials(&self, repository: &str, first: &str) -> Vec<Credentials> {
        let (own, others): (Vec<_>, Vec<_>) = self
            .keyrings
            .iter()
            .partition(|(namespace, _)| *namespace == first);
        let all = own.into_iter().chain(others);
        let mut lists: Vec<_> = all
            .map(|(_, keyring)| keyring.lookup(repository).into_iter())
            .collect();
        let mut tries = Vec::new();
        loop {
            let turn: Vec<_> = lists.iter_mut().filter_map(Iterator::next).collect();
            if turn.is_empty() || tries.len() >= MAX_TRIES {
                tries.truncate(MAX_TRIES);
                return tries;
            }
            for credentials in turn {
                if !tries.contains(&credentials) {
                    tries.push(credentials);
                }
            }
        }
    }

    /// Adds what a Secret holds.
    fn add(&mut self, found: &Found) -> Result<Option<HelpersUnused>, String> {
        let value = |key: &str| found.data.get(key).map(|value| value.0.as_slice());
        let keyring = self.keyrings.entry(found.whose.clone()).or_default();
        keyring.add_secret(&found.type_, value).map_err(|e| e.to_string())
    }

    fn problem(&mut self, title: &str, words: &str) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(format!("pull secret {title}{words}"));
        }
    }
}

/// A Secret that was read, without what is of no use here.
struct Found {
    /// The namespace of the jobs that brought it.
    whose: String,
    /// Its own namespace and name.
    title: String,
    type_: String,
    data: BTreeMap<String, ByteString>,
}

impl Found {
    fn new(secret: Secret, whose: String, title: String) -> Self {
        let mut data = secret.data.unwrap_or_default();
        data.retain(|key, _| [KEY_JSON, KEY_CFG].contains(&key.as_str()));
        Self {
            whose,
            title,
            type_: secret.type_.unwrap_or_else(|| "Opaque".to_owned()),
            data,
        }
    }

    fn bytes(&self) -> usize {
        self.data.values().map(|value| value.0.len()).sum()
    }
}

/// Takes out what is too much: as long as all together are too long, the longest of the namespace that has the most. What
/// a namespace has is known only once its Secrets are read.
fn too_much(all: &mut Vec<Found>) -> Vec<Found> {
    let mut out = Vec::new();
    loop {
        let mut namespaces: BTreeMap<&str, usize> = BTreeMap::new();
        for found in &*all {
            *namespaces.entry(&found.whose).or_default() += found.bytes();
        }
        if namespaces.values().sum::<usize>() <= MAX_SECRET_BYTES {
            return out;
        }
        let most = namespaces.iter().max_by_key(|(_, bytes)| **bytes);
        let Some(most) = most.map(|(namespace, _)| (*namespace).to_owned()) else {
            return out;
        };
        let its = all.iter().enumerate().filter(|(_, found)| found.whose == most);
        let Some((longest, _)) = its.max_by_key(|(_, found)| found.bytes()) else {
            return out;
        };
        out.push(all.remove(longest));
    }
}

/// Reads the Secrets of a tag.
pub async fn secrets(client: &Client, names: &[(String, String)], owners: &[ObjectReference]) -> Secrets {
    let mut secrets = Secrets::default();
    let mut all = Vec::new();
    let deadline = Instant::now() + SECRETS;
    let mut away = false;
    for (namespace, name) in names {
        if away {
            break;
        }
        let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
        let title = format!("{namespace}/{name}");
        let within = deadline.min(Instant::now() + ONE_SECRET);
        let why = match timeout_at(within, write::get(&api, name)).await {
            Ok(Ok(Some(secret))) => {
                let Some(whose) = meant_for(&secret, owners) else {
                    continue;
                };
                all.push(Found::new(secret, whose, title));
                for left_out in too_much(&mut all) {
                    let words = format!(
                        " is not used: the pull secrets of this image are longer than {MAX_SECRET_BYTES} bytes, and \
                         this is the longest of the namespace that has the most"
                    );
                    secrets.problem(&left_out.title, &words);
                }
                continue;
            }
            Ok(Ok(None)) => "it does not exist".to_owned(),
            Ok(Err(error)) => {
                if error.retryable() {
                    secrets.unread = Some(Again::Prevented);
                } else if error.forbidden() {
                    secrets.unread.get_or_insert(Again::Uncounted);
                }
                format!("it cannot be read: {error}")
            }
            Err(_) => {
                away = true;
                secrets.unread = Some(Again::Prevented);
                "the API server did not answer in time".to_owned()
            }
        };
        secrets.problem(&title, &format!(" cannot be used: {why}"));
    }
    for found in &all {
        match secrets.add(found) {
            Ok(None) => {}
            Ok(Some(unused)) => secrets.problem(&found.title, &format!(": {unused}")),
            Err(why) => secrets.problem(&found.title, &format!(" cannot be used: {why}")),
        }
    }
    secrets
}

/// The namespace of the jobs that a Secret serves; `None` where none of them is an owner of the tag. Credentials belong to
/// the jobs that brought them: a copy that names its jobs serves the tags of these only, and one that names none serves
/// all. A NodeImage lists the Secrets of all jobs that want the image.
fn meant_for(secret: &Secret, owners: &[ObjectReference]) -> Option<String> {
    let Some(references) = secret.annotations().get(SECRET_REFERENCES) else {
        return Some(String::new());
    };
    let named = |owner: &&ObjectReference| {
        let job = format!(
            "{}/{}",
            owner.namespace.as_deref().unwrap_or(""),
            owner.name.as_deref().unwrap_or("")
        );
        references.split(',').any(|reference| reference.trim() == job)
    };
    let owner = owners.iter().find(named)?;
    Some(owner.namespace.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn an_image_for_another_platform_is_remarked() {
        let words = foreign("linux/none").unwrap();
        assert!(
            words.contains("linux/none") && words.contains("this node is"),
            "{words}"
        );
        let ours = words.rsplit(' ').next().unwrap();
        assert_eq!(foreign(ours), None);
    }

    #[test]
    fn a_copy_serves_the_jobs_that_it_names() {
        let owner = |name: &str| ObjectReference {
            namespace: Some("ns".to_owned()),
            name: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        let mut secret = Secret::default();
        assert!(
            meant_for(&secret, &[]).is_some(),
            "a secret that names no job serves all"
        );
        secret
            .annotations_mut()
            .insert(SECRET_REFERENCES.to_owned(), "ns/a,ns/b".to_owned());
        assert_eq!(
            meant_for(&secret, &[owner("x"), owner("b")]).as_deref(),
            Some("ns")
        );
        assert_eq!(
            (meant_for(&secret, &[owner("x")]), meant_for(&secret, &[])),
            (None, None)
        );
    }

    /// A Secret that a job of that namespace brought, with these users for `r`; its text has so many bytes at least.
    fn brought_by(namespace: &str, users: &[String], bytes: usize) -> Secret {
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

    /// What an API server that has these Secrets makes of all of them.
    async fn read_all(all: Vec<Secret>, owners: &[ObjectReference]) -> Secrets {
        let names: Vec<_> = (0..all.len()).map(|n| ("ns".to_owned(), n.to_string())).collect();
        let all = std::sync::Arc::new(all);
        let service = tower::service_fn(move |asked: http::Request<kube::client::Body>| {
            let all = std::sync::Arc::clone(&all);
            async move {
                let name = asked.uri().path().rsplit('/').next().unwrap().to_owned();
                let mut secret = all[name.parse::<usize>().unwrap()].clone();
                secret.metadata.name = Some(name);
                let text = serde_json::to_vec(&secret).unwrap();
                Ok::<_, std::io::Error>(http::Response::new(kube::client::Body::from(text)))
            }
        });
        secrets(&Client::new(service, "default"), &names, owners).await
    }

    #[tokio::test]
    async fn secrets_of_one_namespace_leave_room_for_those_of_another() {
        let users = |name: &str| [name.to_owned()];
        let mut all: Vec<_> = (0..64)
            .map(|_| brought_by("large", &users("l"), 300 << 10))
            .collect();
        all.push(brought_by("small", &users("s"), 0));
        let read = read_all(all.clone(), &[job("large"), job("small")]).await;
        let names = |found: Vec<Credentials>| found.into_iter().map(|c| c.username).collect::<Vec<_>>();
        assert_eq!(names(read.credentials("r/a", "small")), ["s", "l"]);
        assert_eq!(names(read.credentials("r/a", "large")), ["l", "s"]);
        assert_eq!(read.problems.len(), MAX_PROBLEMS, "{:?}", read.problems);
        assert!(
            read.problems[0].contains("longer than 1048576 bytes"),
            "{:?}",
            read.problems
        );
        // Alone it has all the room.
        all.truncate(3);
        let read = read_all(all, &[job("large")]).await;
        assert!(read.problems.is_empty(), "{:?}", read.problems);
    }

    #[tokio::test]
    async fn namespaces_without_pull_secrets_take_no_room() {
        let mut owners: Vec<_> = (0..100).map(|n| job(&format!("public-{n}"))).collect();
        owners.push(job("a"));
        owners.push(job("b"));
        let user = |name: &str| [name.to_owned()];
        let all = vec![
            brought_by("a", &user("a"), 900 << 10),
            brought_by("b", &user("b"), 100 << 10),
        ];
        let read = read_all(all, &owners).await;
        assert!(read.problems.is_empty(), "{:?}", read.problems);
        assert_eq!(read.credentials("r/a", "b").len(), 2);
    }

    #[tokio::test]
    async fn a_namespace_within_its_share_keeps_its_pull_secrets_in_any_order() {
        let user = |name: &str| [name.to_owned()];
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let all = [
                brought_by("large", &user("l0"), 400 << 10),
                brought_by("large", &user("l1"), 500 << 10),
                brought_by("a", &user("a"), 300 << 10),
                brought_by("b", &user("b"), 300 << 10),
            ];
            let all = order.iter().map(|n| all[*n].clone()).collect();
            let read = read_all(all, &[job("large"), job("a"), job("b")]).await;
            let names: Vec<_> = read
                .credentials("r/a", "b")
                .into_iter()
                .map(|c| c.username)
                .collect();
            assert_eq!(names, ["b", "a", "l0"], "{order:?}");
            assert_eq!(read.problems.len(), 1, "{:?}", read.problems);
        }
    }

    #[tokio::test]
    async fn credentials_of_namespaces_are_tried_in_turn_and_not_without_end() {
        let many: Vec<_> = (0..200).map(|n| format!("m{n}")).collect();
        let few = ["f0".to_owned(), "f1".to_owned()];
        let all = vec![brought_by("many", &many, 0), brought_by("few", &few, 0)];
        let read = read_all(all, &[job("many"), job("few")]).await;
        let repository = format!("r/{}", "a/".repeat(200));
        let tries = read.credentials(&repository, "many");
        let first: Vec<_> = tries.iter().take(5).map(|c| c.username.as_str()).collect();
        // The most specific entry comes first.
        assert_eq!(first, ["m199", "f1", "m198", "f0", "m197"]);
        assert_eq!(tries.len(), MAX_TRIES);
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_does_not_answer_is_asked_for_one_secret() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, std::io::Error>>()
        });
        let names: Vec<_> = (0..64).map(|n| ("ns".to_owned(), n.to_string())).collect();
        let began = Instant::now();
        let read = secrets(&Client::new(service, "default"), &names, &[]).await;
        assert_eq!(
            (began.elapsed(), read.unread),
            (ONE_SECRET, Some(Again::Prevented))
        );
        assert_eq!(read.problems.len(), 1);
    }

    fn unreachable() -> Error {
        Error::Unreachable {
            socket: "s".into(),
            method: "PullImage",
            why: "reset".to_owned(),
        }
    }

    fn refused(cause: PullCause) -> Error {
        Error::Pull {
            image: "i".to_owned(),
            cause,
            message: "no".to_owned(),
        }
    }

    fn again(error: Error, begun: bool, unread: Option<Again>) -> Again {
        let secrets = Secrets {
            unread,
            ..Secrets::default()
        };
        match ended(Err(Failure { error, begun }), &secrets) {
            Ended::Failed { again, .. } => again,
            pulled @ Ended::Pulled { .. } => panic!("{pulled:?}"),
        }
    }

    #[test]
    fn what_says_nothing_of_the_image_is_no_failed_attempt() {
        let late = || Error::Timeout {
            socket: "s".into(),
            method: "ImageStatus",
            after: Duration::from_secs(5),
        };
        let unread = Some(Again::Prevented);
        assert_eq!(again(unreachable(), true, None), Again::Uncounted);
        assert_eq!(again(unreachable(), false, None), Again::Prevented);
        assert_eq!(again(late(), false, None), Again::Prevented);
        assert_eq!(again(late(), true, unread), Again::Counted);
        for cause in [PullCause::Unauthorized, PullCause::NotFound, PullCause::Throttled] {
            assert_eq!(again(refused(cause), true, unread), Again::Prevented, "{cause}");
            assert_eq!(again(refused(cause), true, None), Again::Counted, "{cause}");
        }
        assert_eq!(again(refused(PullCause::DiskFull), true, unread), Again::Counted);
        assert_eq!(again(refused(PullCause::Platform), true, unread), Again::Never);
    }

    #[test]
    fn problems_of_pull_secrets_come_before_the_failure() {
        let secrets = Secrets {
            problems: vec!["secret x is missing".to_owned()],
            ..Secrets::default()
        };
        let error = Error::Timeout {
            socket: "s".into(),
            method: "PullImage",
            after: Duration::from_secs(5),
        };
        let Ended::Failed { words, .. } = ended(Err(Failure { error, begun: true }), &secrets) else {
            panic!()
        };
        assert_eq!(words, "secret x is missing; the pull did not end within its 5 s");
    }

    /// What an API server that answers with that code, or that is away, makes of one pull secret.
    async fn read_from(code: Option<u16>) -> Secrets {
        let service = tower::service_fn(move |_: http::Request<kube::client::Body>| async move {
            let Some(code) = code else {
                return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
            };
            let status = serde_json::json!({ "kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": "" });
            let body = kube::client::Body::from(status.to_string().into_bytes());
            Ok(http::Response::builder().status(code).body(body).unwrap())
        });
        let names = [("ns".to_owned(), "login".to_owned())];
        secrets(&Client::new(service, "default"), &names, &[]).await
    }

    #[tokio::test]
    async fn a_secret_that_cannot_be_read_for_now_is_not_one_that_is_missing() {
        for (code, unread) in [
            (None, Some(Again::Prevented)),
            (Some(500), Some(Again::Prevented)),
            (Some(429), Some(Again::Prevented)),
            // An API server that has just started does not know the roles yet.
            (Some(403), Some(Again::Uncounted)),
            (Some(404), None),
        ] {
            let read = read_from(code).await;
            assert_eq!(
                (read.unread, read.problems.len()),
                (unread, 1),
                "{code:?}: {read:?}"
            );
        }
    }
}
