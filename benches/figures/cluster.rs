//! Calls of the API server for the rows, the same for both implementations.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use kruise_cluster::{ClientOptions, Cluster};
use kube::Client;
use kube::api::{Api, DynamicObject, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Group, version and kind.
pub type ObjectKind = (&'static str, &'static str, &'static str);
pub const NODE_IMAGE: ObjectKind = ("apps.kruise.io", "v1beta1", "NodeImage");
pub const PULL_JOB: ObjectKind = ("apps.kruise.io", "v1beta1", "ImagePullJob");
pub const RECREATE_REQUEST: ObjectKind = ("apps.kruise.io", "v1beta1", "ContainerRecreateRequest");
pub const RECREATE_JOB: ObjectKind = ("apps.kruise.io", "v1alpha1", "ContainerRecreateJob");
pub const CLONE_SET: ObjectKind = ("apps.kruise.io", "v1beta1", "CloneSet");
pub const SIDECAR_SET: ObjectKind = ("apps.kruise.io", "v1beta1", "SidecarSet");
pub const POD_PROBE_MARKER: ObjectKind = ("apps.kruise.io", "v1alpha1", "PodProbeMarker");
pub const NODE_POD_PROBE: ObjectKind = ("apps.kruise.io", "v1alpha1", "NodePodProbe");
pub const POD: ObjectKind = ("", "v1", "Pod");
pub const NODE: ObjectKind = ("", "v1", "Node");

/// Namespace of the measured objects.
pub const NAMESPACE: &str = "default";

/// Timeout of each step.
const TIMEOUT: Duration = Duration::from_secs(240);

/// A client for a kubeconfig. It is the product's: kube's client does not set TCP_NODELAY, which costs 40 ms per write.
pub async fn client(path: &Path) -> Result<Client> {
    let options = ClientOptions {
        kubeconfig: Some(path.to_owned()),
        component: "bench".into(),
        host: None,
    };
    Ok(Cluster::connect(&options).await?.client)
}

/// Objects of a kind: in `namespace`, or of the cluster.
pub fn api(client: &Client, kind: ObjectKind, namespace: Option<&str>) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(kind.0, kind.1, kind.2));
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

/// Creates an object from JSON that has neither kind nor version.
pub async fn create(
    client: &Client,
    kind: ObjectKind,
    namespace: Option<&str>,
    object: Value,
) -> Result<DynamicObject> {
    let mut object = object;
    object["apiVersion"] = if kind.0.is_empty() {
        kind.1.into()
    } else {
        format!("{}/{}", kind.0, kind.1).into()
    };
    object["kind"] = kind.2.into();
    let object: DynamicObject = serde_json::from_value(object)?;
    let created = api(client, kind, namespace)
        .create(&PostParams::default(), &object)
        .await;
    created.with_context(|| format!("cannot create {} {:?}", kind.2, object.metadata.name))
}

/// Objects with the time at which they were observed.
pub type ObjectStream = UnboundedReceiver<(Instant, DynamicObject)>;

/// Watches from now on; the watch is established when this returns. It is restarted if it ends, as the API server ends
/// the watch of a client that reads too slowly; all existing objects are then sent once more.
pub async fn watch(client: &Client, kind: ObjectKind, namespace: Option<&str>) -> Result<ObjectStream> {
    let config = watcher::Config::default().streaming_lists();
    let mut events = watcher(api(client, kind, namespace), config)
        .default_backoff()
        .boxed();
    while !matches!(
        events.try_next().await?.context("the watch ended")?,
        Event::InitDone
    ) {}
    let (object_tx, object_rx) = unbounded_channel();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if let Ok(Event::Apply(object) | Event::InitApply(object)) = event
                && object_tx.send((Instant::now(), object)).is_err()
            {
                break;
            }
        }
    });
    Ok(object_rx)
}

/// The moment at which `done` first held of the object `name`.
pub async fn wait_for(
    watch: &mut ObjectStream,
    name: &str,
    predicate: impl Fn(&Value) -> bool,
) -> Result<(Instant, Value)> {
    let matches = |o: &DynamicObject| o.metadata.name.as_deref() == Some(name) && predicate(&o.data);
    next_matching(watch, matches)
        .await
        .with_context(|| name.to_owned())
}

/// The next object for which `done` holds, and when it was observed.
pub async fn next_matching(
    watch: &mut ObjectStream,
    predicate: impl Fn(&DynamicObject) -> bool,
) -> Result<(Instant, Value)> {
    let search = async {
        while let Some((seen_at, object)) = watch.recv().await {
            if predicate(&object) {
                return Ok((seen_at, object.data));
            }
        }
        bail!("the watch ended")
    };
    tokio::time::timeout(TIMEOUT, search)
        .await
        .with_context(|| format!("not there after {TIMEOUT:?}"))?
}

/// Whether a Pod is ready.
pub fn ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|c| c.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
}

/// Waits until `done` holds for an existing object.
pub async fn wait_until(
    client: &Client,
    kind: ObjectKind,
    namespace: Option<&str>,
    name: &str,
    predicate: impl Fn(&Value) -> bool,
) -> Result<DynamicObject> {
    let api = api(client, kind, namespace);
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        if let Some(object) = api.get_opt(name).await?
            && predicate(&object.data)
        {
            return Ok(object);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("{} {name}: not there after {TIMEOUT:?}", kind.2)
}

/// The median; of an even number, the later of the two.
pub fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}
