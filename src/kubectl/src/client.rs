//! Requests to the API server with the user's kubeconfig, each with a deadline.

use std::fmt::Debug;
use std::path::PathBuf;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use kruise_api::keys::SYSTEM_NAMESPACE;
use kruise_api::names;
use kruise_api::text::printable;
use kruise_cluster::write::{self, REQUEST_TIMEOUT};
use kruise_cluster::{error_chain, page};
use kube::api::{ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
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
    let selected = KubeConfigOptions {
        context: options.context.clone(),
        ..KubeConfigOptions::default()
    };
    let refuse = |what: &str, why: &dyn std::error::Error| {
        Error::Refused(format!("{}: {}", printable(what), printable(&error_chain(why))))
    };
    match &options.kubeconfig {
        Some(path) => {
            let what = format!("kubeconfig {}", path.display());
            let file = Kubeconfig::read_from(path).map_err(|why| refuse(&what, &why))?;
            let config = Config::from_custom_kubeconfig(file, &selected).await;
            config.map_err(|why| refuse(&what, &why))
        }
        None if options.context.is_some() => {
            let config = Config::from_kubeconfig(&selected).await;
            config.map_err(|why| refuse("kubeconfig", &why))
        }
        None => {
            let config = Config::infer().await;
            config.map_err(|why| refuse("no kubeconfig and no service account", &why))
        }
    }
}

impl Connection {
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
    let found = write::get(api, name).await?;
    found.ok_or_else(|| Error::NotFound {
        plural: qualified_plural::<K>(),
        name: name.to_owned(),
    })
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
        let fetched = page::fetch::<Value>(&client, api.resource_url(), &params);
        let fetched = tokio::time::timeout(LIST_TIMEOUT, fetched).await;
        let fetched = fetched.map_err(|_| timeout_error::<K>("list", LIST_TIMEOUT))?;
        let Some(list) = fetched.map_err(kruise_cluster::Error::from)? else {
            page::reduce_limit(&mut params);
            continue;
        };
        for item in list.items {
            let name = item.pointer("/metadata/name").and_then(Value::as_str);
            let name = name.unwrap_or_default().to_owned();
            match serde_json::from_value(item) {
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
    Ok(write::create(api, object).await?.object()?)
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
    let mut failures = 0;
    let mut outage: Option<Instant> = None;
    loop {
        match follow_once(api, name, uid, &mut observe).await {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => (failures, outage) = (0, None),
            Err(error) if !error.retryable() => return Err(error),
            Err(error) => {
                let since = *outage.get_or_insert_with(Instant::now);
                if since.elapsed() >= OUTAGE_TIMEOUT {
                    return Err(error);
                }
                if failures == 0 {
                    note(&format!("{}; trying again for {OUTAGE_TIMEOUT:?}", error.text()));
                }
                failures += 1;
            }
        }
        // Also after a watch that ended at once.
        tokio::time::sleep(Duration::from_millis(500 << failures.min(4))).await;
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use kruise_api::image_pull_job::ImagePullJob;
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// An API server that has one ImagePullJob, and fails between the first request and `up_at`.
    fn failing_client(up_at: Instant) -> Client {
        let was_requested = AtomicBool::new(false);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let up = !was_requested.swap(true, Ordering::Relaxed) || Instant::now() >= up_at;
            let watches = request
                .uri()
                .query()
                .is_some_and(|query| query.contains("watch="));
            let (code, body) = match (up, watches) {
                (false, _) => (
                    503,
                    json!({ "kind": "Status", "code": 503, "reason": "ServiceUnavailable" }),
                ),
                // A watch that ends at once.
                (true, true) => (200, Value::Null),
                (true, false) => (
                    200,
                    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
                        "metadata": { "name": "job", "namespace": "n", "uid": "u", "resourceVersion": "1" },
                        "spec": { "image": "a:1", "completionPolicy": {} } }),
                ),
            };
            let text = if body.is_null() {
                String::new()
            } else {
                body.to_string()
            };
            let answer = http::Response::builder()
                .status(code)
                .body(Body::from(text.into_bytes()));
            std::future::ready(answer)
        });
        Client::new(service, "n")
    }

    /// Follows the job until it was read twice; returns the seconds that it took.
    async fn follow_through(outage: Duration, note: impl Fn(&str)) -> Result<u64, Error> {
        let start = Instant::now();
        let jobs = Api::<ImagePullJob>::namespaced(failing_client(start + outage), "n");
        let mut reads = 0;
        follow(&jobs, "job", "u", note, |_| {
            reads += 1;
            (reads == 2).then_some(())
        })
        .await?;
        Ok(start.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn outage_of_the_control_plane_is_waited_for() {
        let notes = RefCell::new(Vec::new());
        let note = |line: &str| notes.borrow_mut().push(line.to_owned());
        let waited = follow_through(Duration::from_secs(150), note).await.unwrap();
        assert!((150..170).contains(&waited), "{waited} s");
        let notes = notes.into_inner();
        assert!(
            notes.len() == 1 && notes[0].ends_with("; trying again for 180s"),
            "{notes:?}"
        );
        let error = follow_through(Duration::from_secs(3600), |_| ())
            .await
            .unwrap_err();
        assert!(error.retryable(), "{error}");
    }
}
