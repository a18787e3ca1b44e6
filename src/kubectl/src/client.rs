//! Requests to the API server with the user's kubeconfig, each with a deadline.

use std::cell::Cell;
use std::env;
use std::ffi::OsStr;
use std::fmt::Debug;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use kruise_api::keys::SYSTEM_NAMESPACE;
use kruise_api::names;
use kruise_api::text::printable;
use kruise_cluster::write::{self, REQUEST_TIMEOUT};
use kruise_cluster::{error_chain, page};
use kube::api::{ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{ObjectList, Request, Status};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::arguments::{object_name, shell_word};
use super::error::Error;

/// Options of every command.
#[derive(clap::Args, Clone, Debug)]
pub struct GlobalOptions {
    /// Namespace of the objects; when absent, the namespace of the kubeconfig's context, or all for status and node
    #[arg(short, long, global = true, value_name = "NAMESPACE", value_parser = super::arguments::namespace)]
    pub namespace: Option<String>,

    /// Namespace that Kruise is installed in
    #[arg(long, global = true, value_name = "NAMESPACE", default_value = SYSTEM_NAMESPACE,
        value_parser = super::arguments::namespace)]
    pub kruise_namespace: String,

    /// Context of the kubeconfig; its current context when absent
    #[arg(long, global = true, value_name = "CONTEXT")]
    pub context: Option<String>,

    /// Kubeconfig file; KUBECONFIG, ~/.kube/config or the service account of the Pod when absent
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// The option of commands that are about all namespaces unless one is named.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct ScopeOptions {
    /// All namespaces, which is the default; takes precedence over -n
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
}

/// A connection to the API server.
#[derive(Clone)]
pub struct Connection {
    pub client: Client,
    /// The namespace of the command.
    pub namespace: String,
    /// The namespace that Kruise is installed in.
    pub kruise_namespace: String,
    /// The namespace that the user named; without one, commands about the cluster are about all namespaces.
    pub named_namespace: Option<String>,
    /// Options that another command needs to reach the same cluster, each after a space.
    pub cluster_options: String,
}

/// Timeout of one page of a list.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Objects of one page.
const PAGE_SIZE: u32 = 250;
/// Seconds after which the API server ends a watch, which is then started again.
const WATCH_SECONDS: u32 = 60;
/// Silence after which a watch is started again: its connection is lost.
const WATCH_SILENCE: Duration = Duration::from_secs(75);
/// How long the API server may fail before an object is not followed any more: a control plane that restarts or is
/// upgraded is back by then.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(180);
/// Pause before the next attempt, which each failure doubles.
const MIN_PAUSE: Duration = Duration::from_millis(500);

/// Reads the kubeconfig. No request is sent.
pub async fn connect(options: &GlobalOptions) -> Result<Connection, Error> {
    let mut config = load_config(options).await?;
    config.connect_timeout = Some(REQUEST_TIMEOUT);
    let namespace = match &options.namespace {
        Some(namespace) => namespace.clone(),
        None => config.default_namespace.clone(),
    };
    if !names::is_label(&namespace) {
        return Err(Error::Usage(format!(
            "invalid namespace {namespace:?} in the kubeconfig: {}",
            names::LABEL
        )));
    }
    let client = Client::try_from(config).map_err(|error| Error::Refused(error_chain(&error)))?;
    Ok(Connection {
        kruise_namespace: options.kruise_namespace.clone(),
        client,
        namespace,
        named_namespace: options.namespace.clone(),
        cluster_options: cluster_options(options),
    })
}

fn cluster_options(options: &GlobalOptions) -> String {
    let kubeconfig = options.kubeconfig.as_ref().map(|path| path.display().to_string());
    [("context", options.context.clone()), ("kubeconfig", kubeconfig)]
        .into_iter()
        .filter_map(|(flag, value)| Some(format!(" --{flag} {}", shell_word(&value?))))
        .collect()
}

async fn load_config(options: &GlobalOptions) -> Result<Config, Error> {
    let refuse = |what: &str, why: &dyn std::error::Error| {
        Error::Refused(format!("{}: {}", printable(what), printable(&error_chain(why))))
    };
    let what = match &options.kubeconfig {
        Some(path) => format!("kubeconfig {}", path.display()),
        None => "kubeconfig".to_owned(),
    };
    let (variable, home) = (env::var_os("KUBECONFIG"), env::home_dir());
    let found = read_kubeconfig(
        options.kubeconfig.as_deref(),
        variable.as_deref(),
        home.as_deref(),
    );
    let found = found.map_err(|why| refuse(&what, &why))?;
    if found.is_none() && options.context.is_none() {
        return Config::incluster().map_err(|why| refuse("no kubeconfig and no service account", &why));
    }
    let selected = KubeConfigOptions {
        context: options.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = Config::from_custom_kubeconfig(found.unwrap_or_default(), &selected).await;
    config.map_err(|why| refuse(&what, &why))
}

/// The kubeconfig as kubectl reads it, from the file of the flag, those of `KUBECONFIG`, or the one in the home
/// directory; `None` if there is none, without the flag.
fn read_kubeconfig(
    flag: Option<&Path>,
    variable: Option<&OsStr>,
    home: Option<&Path>,
) -> Result<Option<Kubeconfig>, KubeconfigError> {
    if let Some(path) = flag {
        return Kubeconfig::read_from(path).map(|config| Some(without_empty_values(config)));
    }
    let listed = variable.map(|list| env::split_paths(list).collect());
    let mut paths: Vec<PathBuf> = listed.unwrap_or_default();
    paths.retain(|path| !path.as_os_str().is_empty());
    let default = home.map(|home| home.join(".kube/config"));
    if paths.is_empty() {
        paths.extend(default.clone());
    }
    let (mut merged, mut missing): (Option<Kubeconfig>, _) = (None, None);
    for path in paths {
        match Kubeconfig::read_from(&path) {
            Ok(next) => merged = Some(merged.unwrap_or_default().merge(without_empty_values(next))?),
            Err(KubeconfigError::ReadConfig(why, _)) if why.kind() == ErrorKind::NotFound => {
                missing = Some(KubeconfigError::ReadConfig(why, path));
            }
            Err(why) => return Err(why),
        }
    }
    match missing {
        // kubectl does not read the default file then; it is no reason to use the service account either.
        Some(why) if merged.is_none() && default.is_some_and(|path| path.exists()) => Err(why),
        _ => Ok(merged),
    }
}

/// For kubectl an empty string is as good as none; the client library uses it as a name.
fn without_empty_values(mut config: Kubeconfig) -> Kubeconfig {
    let not_empty = |value: &String| !value.is_empty();
    config.current_context = config.current_context.filter(not_empty);
    for context in config
        .contexts
        .iter_mut()
        .filter_map(|named| named.context.as_mut())
    {
        context.namespace = context.namespace.take().filter(not_empty);
    }
    config
}

impl Connection {
    /// The connection for the namespaces that the user named.
    pub fn in_scope(&self, scope: ScopeOptions) -> Self {
        let mut scoped = self.clone();
        scoped.named_namespace = scoped.named_namespace.filter(|_| !scope.all_namespaces);
        scoped
    }

    /// Objects of a kind in the namespace of the command.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Objects of a kind in the namespace that the user named, or in all.
    pub fn api_of_scope<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match &self.named_namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }
}

/// The object of that name.
pub async fn get<K: write::Object>(api: &Api<K>, name: &str) -> Result<K, Error> {
    if let Some(found) = write::get(api, name).await? {
        return Ok(found);
    }
    // Only the response itself shows whether the server has the kind.
    if let Ok(Err(why)) = tokio::time::timeout(REQUEST_TIMEOUT, Box::pin(api.get(name))).await
        && let missing @ Error::NoResourceType(_) = request_error::<K>(why.into())
    {
        return Err(missing);
    }
    Err(Error::NotFound {
        plural: qualified_plural::<K>(),
        name: name.to_owned(),
    })
}

/// The error of a request about this kind.
fn request_error<K: Resource<DynamicType = ()>>(error: kruise_cluster::Error) -> Error {
    let is_about_kind = match &error {
        kruise_cluster::Error::Api(status) => error.not_found() && !names_object(status),
        _ => false,
    };
    if is_about_kind {
        return Error::NoResourceType(qualified_plural::<K>());
    }
    error.into()
}

/// Whether a refusal is about one object; the one of a kind that the server does not have is not.
fn names_object(status: &Status) -> bool {
    let details = status.details.as_ref();
    details.is_some_and(|details| !details.name.is_empty())
}

/// The plural of a kind with its group, as kubectl names it in messages: `clonesets.apps.kruise.io`, `pods`.
pub fn qualified_plural<K: Resource<DynamicType = ()>>() -> String {
    let (plural, group) = (K::plural(&()), K::group(&()));
    if group.is_empty() {
        return plural.into_owned();
    }
    format!("{plural}.{group}")
}

/// Reads a list page by page. Objects that cannot be read are left out, and their names are returned.
pub async fn list<K>(
    api: &Api<K>,
    mut params: ListParams,
    mut each: impl FnMut(K),
) -> Result<Vec<String>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned,
{
    let client = api.clone().into_client();
    params.limit = Some(PAGE_SIZE);
    let mut unreadable = Vec::new();
    loop {
        let (kind, path) = (K::kind(&()), api.resource_url());
        let list = page::fetch_fitting(&client, path, Request::list, &mut params, &kind, LIST_TIMEOUT);
        let list: ObjectList<Box<RawValue>> = list.await.map_err(request_error::<K>)?;
        let bytes = list.items.iter().map(|text| text.get().len()).sum();
        page::raise_limit(&mut params, Some(PAGE_SIZE), bytes);
        for text in list.items {
            let mut name = String::new();
            let object = serde_json::from_str::<Value>(text.get()).and_then(|item| {
                let found = item.pointer("/metadata/name").and_then(Value::as_str);
                name = found.unwrap_or_default().to_owned();
                serde_json::from_value(item)
            });
            match object {
                Ok(object) => each(object),
                Err(why) => unreadable.push(format!("{} {name:?} cannot be read: {why}", K::kind(&()))),
            }
        }
        params.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(unreadable);
        }
    }
}

/// Sends a JSON patch.
pub async fn patch_json<K: write::Object>(
    api: &Api<K>,
    name: &str,
    patch: json_patch::Patch,
) -> Result<(), Error> {
    object_name(name).map_err(Error::Usage)?;
    let (params, patch) = (PatchParams::default(), Patch::Json::<()>(patch));
    let sent = tokio::time::timeout(REQUEST_TIMEOUT, api.patch(name, &params, &patch)).await;
    let sent = sent.map_err(|_| timeout_error::<K>("patch", REQUEST_TIMEOUT))?;
    sent.map(|_| ())
        .map_err(|why| kruise_cluster::Error::from(why).into())
}

/// Creates an object, and returns it as it is stored.
pub async fn create<K: write::Object>(api: &Api<K>, object: &K) -> Result<K, Error> {
    let stored = write::create(api, object).await;
    Ok(stored.map_err(request_error::<K>)?.object()?)
}

/// Creates an object of a name that no other client chooses, also if the API server fails at first: an attempt that
/// failed may have stored the object.
pub async fn create_once<K: write::Object>(
    api: &Api<K>,
    object: &K,
    is_ours: impl Fn(&K) -> bool,
    note: impl Fn(&str),
) -> Result<K, Error> {
    let name = object.meta().name.clone().unwrap_or_default();
    let attempt = async || match create(api, object).await {
        Err(Error::Server(taken)) if taken.already_exists() => {
            let found = get(api, &name).await?;
            is_ours(&found).then_some(found).ok_or(Error::Server(taken))
        }
        created => created,
    };
    retry(note, attempt).await
}

/// Repeats a request while the API server fails, for [`OUTAGE_TIMEOUT`] at most, which is reported to `note`.
pub async fn retry<T>(
    note: impl Fn(&str),
    mut request: impl AsyncFnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    let mut outage = Outage::default();
    loop {
        match request().await {
            Ok(value) => return Ok(value),
            Err(error) => outage.wait(error, false, &note).await?,
        }
    }
}

/// A time in which the API server fails.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    failures: u32,
}

impl Outage {
    /// Waits before the next attempt, or returns the error, if it is final. A missing permission is final unless the
    /// command had it before: an API server that starts has not loaded it yet.
    async fn wait(&mut self, error: Error, had_permission: bool, note: &impl Fn(&str)) -> Result<(), Error> {
        let may_recover = match error.forbidden() {
            true => had_permission || self.since.is_some(),
            false => error.retryable(),
        };
        let since = *self.since.get_or_insert_with(Instant::now);
        if !may_recover || since.elapsed() >= OUTAGE_TIMEOUT {
            return Err(error);
        }
        if self.failures == 0 {
            note(&format!("{}; trying again for {OUTAGE_TIMEOUT:?}", error.text()));
        }
        self.failures += 1;
        tokio::time::sleep(MIN_PAUSE * (1_u32 << self.failures.min(4))).await;
        Ok(())
    }
}

fn timeout_error<K: Resource<DynamicType = ()>>(verb: &'static str, after: Duration) -> Error {
    let kind = K::kind(&()).into_owned();
    kruise_cluster::Error::Timeout { verb, kind, after }.into()
}

/// Follows the object of that name and UID until `observe` returns a value.
///
/// It is called with the object as it is, and after every change. The API server may fail for [`OUTAGE_TIMEOUT`], which
/// is reported to `note`.
pub async fn follow<K, T>(
    api: &Api<K>,
    name: &str,
    uid: &str,
    note: impl Fn(&str),
    mut observe: impl FnMut(&K) -> Option<T>,
) -> Result<T, Error>
where
    K: write::Object + Serialize + Debug,
{
    let was_read = Cell::new(false);
    let mut observe = |object: &K| {
        was_read.set(true);
        observe(object)
    };
    let mut outage = Outage::default();
    loop {
        match follow_once(api, name, uid, &mut observe).await {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => {
                outage = Outage::default();
                // The watch may have ended at once.
                tokio::time::sleep(MIN_PAUSE).await;
            }
            Err(error) => outage.wait(error, was_read.get(), &note).await?,
        }
    }
}

/// Reads the object, and watches it until `observe` returns a value or the watch ends.
async fn follow_once<K, T>(
    api: &Api<K>,
    name: &str,
    uid: &str,
    observe: &mut impl FnMut(&K) -> Option<T>,
) -> Result<Option<T>, Error>
where
    K: write::Object,
{
    let gone = || Error::Failed(format!("{} {name:?} was deleted", qualified_plural::<K>()));
    let object = write::get(api, name).await?.ok_or_else(gone)?;
    if object.meta().uid.as_deref() != Some(uid) {
        return Err(gone());
    }
    if let Some(value) = observe(&object) {
        return Ok(Some(value));
    }
    let version = object.meta().resource_version.clone().unwrap_or_default();
    let params = WatchParams::default()
        .fields(&format!("metadata.name={name}"))
        .timeout(WATCH_SECONDS);
    let started = tokio::time::timeout(REQUEST_TIMEOUT, api.watch(&params, &version)).await;
    let started = started.map_err(|_| timeout_error::<K>("watch", REQUEST_TIMEOUT))?;
    let mut events = Box::pin(started.map_err(kruise_cluster::Error::from)?);
    while let Some(event) = next_event(&mut events).await {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                if object.meta().uid.as_deref() != Some(uid) {
                    return Err(gone());
                }
                if let Some(value) = observe(&object) {
                    return Ok(Some(value));
                }
            }
            WatchEvent::Deleted(_) => return Err(gone()),
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(status) if status.code == 403 => {
                return Err(kruise_cluster::Error::Api(status).into());
            }
            WatchEvent::Error(_) => break,
        }
    }
    Ok(None)
}

/// The next event; `None` when the watch has ended, failed or been silent for too long.
async fn next_event<K>(
    events: &mut (impl Stream<Item = kube::Result<WatchEvent<K>>> + Unpin),
) -> Option<WatchEvent<K>> {
    let event = tokio::time::timeout(WATCH_SILENCE, events.next()).await;
    event.ok().flatten()?.ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::RefCell;
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use kruise_api::cloneset::CloneSet;
    use kruise_api::image_pull_job::ImagePullJob;
    use serde_json::json;

    use super::*;
    use crate::fake_server::{self, Response, failure};

    fn job() -> Value {
        json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": { "name": "job", "namespace": "n", "uid": "u", "resourceVersion": "1" },
            "spec": { "image": "a:1", "completionPolicy": {} } })
    }

    fn jobs_of(client: Client) -> Api<ImagePullJob> {
        Api::namespaced(client, "n")
    }

    /// An API server that has one ImagePullJob, and responds so between the first `good` requests and `up_at`.
    fn failing_client(good: usize, up_at: Instant, fails: fn() -> Response) -> Client {
        let requests = AtomicUsize::new(0);
        fake_server::client(move |request| {
            let up = requests.fetch_add(1, Ordering::Relaxed) < good || Instant::now() >= up_at;
            match (up, request.query.contains("watch=")) {
                (false, _) => fails(),
                // A watch that ends at once.
                (true, true) => (200, Value::Null),
                (true, false) => (200, job()),
            }
        })
    }

    /// Follows the job until it was read twice; returns the seconds that it took.
    async fn follow_twice(
        good: usize,
        outage: Duration,
        fails: fn() -> Response,
        note: impl Fn(&str),
    ) -> Result<u64, Error> {
        let start = Instant::now();
        let jobs = jobs_of(failing_client(good, start + outage, fails));
        let mut reads = 0;
        follow(&jobs, "job", "u", note, |_| {
            reads += 1;
            (reads == 2).then_some(())
        })
        .await?;
        Ok(start.elapsed().as_secs())
    }

    fn unavailable() -> Response {
        failure(503, "ServiceUnavailable")
    }

    fn forbidden() -> Response {
        failure(403, "Forbidden")
    }

    #[tokio::test(start_paused = true)]
    async fn outage_of_the_control_plane_is_waited_for() {
        let notes = RefCell::new(Vec::new());
        let note = |line: &str| notes.borrow_mut().push(line.to_owned());
        let outage = Duration::from_secs(150);
        let waited = follow_twice(1, outage, unavailable, note).await.unwrap();
        assert!((150..170).contains(&waited), "{waited} s");
        let notes = notes.into_inner();
        assert!(
            notes.len() == 1 && notes[0].ends_with("; trying again for 180s"),
            "{notes:?}"
        );
        let error = follow_twice(1, Duration::from_secs(3600), unavailable, |_| ())
            .await
            .unwrap_err();
        assert!(error.retryable(), "{error}");
    }

    /// An API server that starts refuses everything until it has loaded the roles.
    #[tokio::test(start_paused = true)]
    async fn permission_that_was_there_before_is_waited_for() {
        let waited = follow_twice(1, Duration::from_secs(60), forbidden, |_| ())
            .await
            .unwrap();
        assert!((60..80).contains(&waited), "{waited} s");
        let start = Instant::now();
        let lost = follow_twice(1, Duration::from_secs(3600), forbidden, |_| ()).await;
        assert!(lost.unwrap_err().forbidden());
        assert!((180..200).contains(&start.elapsed().as_secs()));
    }

    #[tokio::test(start_paused = true)]
    async fn permission_that_never_was_there_is_not_waited_for() {
        let start = Instant::now();
        let refused = follow_twice(0, Duration::from_secs(60), forbidden, |_| ()).await;
        assert!(refused.unwrap_err().forbidden());
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    /// The attempt whose response was lost has stored the object.
    #[tokio::test(start_paused = true)]
    async fn object_that_a_failed_attempt_created_is_recognised() {
        let creates = Arc::new(AtomicUsize::new(0));
        let count = creates.clone();
        let client = fake_server::client(move |request| match request.method.as_str() {
            "POST" if count.fetch_add(1, Ordering::Relaxed) == 0 => {
                (504, json!({ "kind": "Status", "code": 504 }))
            }
            "POST" => failure(409, "AlreadyExists"),
            _ => (200, job()),
        });
        let planned: ImagePullJob = serde_json::from_value(job()).unwrap();
        let jobs = jobs_of(client);
        let same = |found: &ImagePullJob| found.spec.image == "a:1";
        let created = create_once(&jobs, &planned, same, |_| ()).await.unwrap();
        assert_eq!(created.metadata.uid.as_deref(), Some("u"));
        assert_eq!(creates.load(Ordering::Relaxed), 2);
        let other = create_once(&jobs, &planned, |_| false, |_| ()).await.unwrap_err();
        assert!(other.text().contains("AlreadyExists"), "{other}");
    }

    #[tokio::test]
    async fn missing_kind_is_not_a_missing_object() {
        let sets = |client| Api::<CloneSet>::namespaced(client, "n");
        let error = |response: Response| async move {
            let client = fake_server::client(move |_| response.clone());
            let gotten = get(&sets(client.clone()), "web").await.unwrap_err();
            let listed = list(&sets(client), ListParams::default(), |_| ())
                .await
                .unwrap_err();
            (gotten.text(), listed.text())
        };
        let missing = "error: the server doesn't have a resource type \"clonesets.apps.kruise.io\"; is Kruise installed?";
        let status = json!({ "kind": "Status", "code": 404, "reason": "NotFound", "details": {} });
        for response in [(404, status), (404, json!("404 page not found"))] {
            assert_eq!(error(response).await, (missing.to_owned(), missing.to_owned()));
        }
        let (gotten, _) = error(failure(404, "NotFound")).await;
        assert_eq!(
            gotten,
            "Error from server (NotFound): clonesets.apps.kruise.io \"web\" not found"
        );
    }

    #[tokio::test]
    async fn page_size_is_raised_after_a_large_page() {
        let limits = Arc::new(Mutex::new(Vec::new()));
        let seen = limits.clone();
        let client = fake_server::client(move |request| {
            let limit = request
                .query
                .split('&')
                .find_map(|part| part.strip_prefix("limit="));
            let limit: u32 = limit.unwrap().parse().unwrap();
            let mut seen = seen.lock().unwrap();
            seen.push(limit);
            let padding = if seen.len() == 1 { 9 << 20 } else { 0 };
            let next = if seen.len() < 5 { "more" } else { "" };
            let body = json!({ "apiVersion": "v1", "kind": "List", "padding": " ".repeat(padding),
                "metadata": { "continue": next }, "items": [job(), { "metadata": { "name": "odd" }, "spec": 1 }] });
            (200, body)
        });
        let mut names = Vec::new();
        let unreadable = list(&jobs_of(client), ListParams::default(), |job| {
            names.push(job.metadata.name)
        })
        .await;
        assert_eq!(*limits.lock().unwrap(), [250, 62, 124, 248, 250]);
        assert_eq!(names.len(), 4);
        let unreadable = unreadable.unwrap();
        assert!(
            unreadable[0].starts_with("ImagePullJob \"odd\" cannot be read: "),
            "{unreadable:?}"
        );
    }

    /// A directory of its own for the files of a test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = env::temp_dir().join(format!("kubectl-kruise-{}-{test}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn kubeconfig(current: &str, context: &str, namespace: &str) -> String {
        json!({ "current-context": current, "clusters": [{ "name": "c", "cluster": { "server": format!("https://{context}") } }],
            "contexts": [{ "name": context, "context": { "cluster": "c", "namespace": namespace } }] })
        .to_string()
    }

    #[test]
    fn only_a_missing_kubeconfig_leaves_the_service_account() {
        let folder = Folder::new("broken");
        let read = |flag: Option<&Path>, variable: &str| {
            read_kubeconfig(flag, Some(variable.as_ref()), Some(&folder.0))
        };
        assert!(read(None, "").unwrap().is_none());
        assert!(read(None, "/nowhere/a:/nowhere/b").unwrap().is_none());
        assert!(read(Some(Path::new("/nowhere/a")), "").is_err());
        assert!(read_kubeconfig(None, None, None).unwrap().is_none());
        let broken = folder.write("broken", "clusters: [");
        assert!(read(None, broken.to_str().unwrap()).is_err());
        folder.write(".kube/config", "clusters: {");
        assert!(read(None, "").is_err());
        assert!(read(None, "/nowhere/a").is_err());
    }

    #[tokio::test]
    async fn first_kubeconfig_with_a_value_wins() {
        let folder = Folder::new("merge");
        let paths = [
            folder.0.join("missing"),
            folder.write("a", &kubeconfig("", "a", "")),
            folder.write("b", &kubeconfig("a", "b", "other")),
            folder.write("c", &kubeconfig("b", "a", "other")),
        ];
        let list = env::join_paths(paths).unwrap();
        let merged = read_kubeconfig(None, Some(&list), None).unwrap().unwrap();
        assert_eq!(merged.current_context.as_deref(), Some("a"));
        let config = Config::from_custom_kubeconfig(merged, &KubeConfigOptions::default()).await;
        let config = config.unwrap();
        assert_eq!(config.cluster_url.host(), Some("a"));
        assert_eq!(config.default_namespace, "default");
    }

    #[tokio::test]
    async fn all_namespaces_is_stronger_than_a_named_one() {
        let mut connection = fake_server::connection(|_| (200, Value::Null));
        connection.named_namespace = Some("apps".to_owned());
        let scope = |all_namespaces| {
            connection
                .in_scope(ScopeOptions { all_namespaces })
                .named_namespace
        };
        assert_eq!(scope(true), None);
        assert_eq!(scope(false).as_deref(), Some("apps"));
    }
}
