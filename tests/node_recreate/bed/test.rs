//! A namespace of one test, to make things in and to ask what happened.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kruise_cluster::write::Object;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Client, Resource, ResourceExt};
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;
use tokio::sync::Notify;

use super::Bed;
use crate::connect::connect;
use crate::waits::{self, named};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Objects of a namespace.
pub trait Kind: Object + Resource<Scope = NamespaceResourceScope> + Send + 'static {}
impl<K: Object + Resource<Scope = NamespaceResourceScope> + Send + 'static> Kind for K {}

/// A namespace of its own on the shared node.
pub struct Test<G> {
    pub bed: G,
    pub client: Client,
    pub namespace: String,
    /// A folder of the host that containers write to at `/log`.
    pub log: PathBuf,
}

impl<G: std::ops::Deref<Target = Bed>> Test<G> {
    pub(super) async fn new(bed: G) -> Self {
        let namespace = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let client = connect(bed.node.plane.kubeconfig()).await.client;
        let object: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
        let api: Api<Namespace> = Api::all(client.clone());
        api.create(&PostParams::default(), &object).await.unwrap();
        let log = bed.node.runtime.dir().join("logs").join(&namespace);
        std::fs::create_dir_all(&log).unwrap();
        std::fs::set_permissions(&log, std::fs::Permissions::from_mode(0o777)).unwrap();
        let test = Self {
            bed,
            client,
            namespace,
            log,
        };
        test.until("the default service account", || async {
            let api: Api<k8s_openapi::api::core::v1::ServiceAccount> = test.api();
            api.get_opt("default").await.unwrap()
        })
        .await;
        test
    }

    pub fn api<K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Asks until there is an answer; for what no watch tells of.
    pub async fn until<T, F: Future<Output = Option<T>>>(&self, what: &str, ask: impl Fn() -> F) -> T {
        waits::until(what, &|| self.bed.tail(), ask).await
    }

    /// Follows one object until `wanted` says that it is as it should be; returns it, and every version seen.
    pub async fn follow<K: Kind>(&self, name: &str, what: &str, wanted: impl Fn(&K) -> bool) -> (K, Vec<K>) {
        self.follow_from(name, what, wanted, async {}).await.0
    }

    /// The same for an object that is made only when the watch is there, so that no version is missed; and what
    /// `make` came to.
    pub async fn follow_from<K: Kind, T>(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&K) -> bool,
        make: impl Future<Output = T>,
    ) -> ((K, Vec<K>), T) {
        let watching = Notify::new();
        let mut seen = Vec::new();
        let wanted = |found: &[&K]| {
            watching.notify_one();
            // A watch that begins anew tells of what has been seen again.
            let news = |object: &&&K| {
                seen.last()
                    .is_none_or(|last: &K| last.resource_version() != object.resource_version())
            };
            let news: Vec<K> = found
                .iter()
                .filter(news)
                .map(|object| (*object).clone())
                .collect();
            seen.extend(news);
            found.first().is_some_and(|object| wanted(object))
        };
        let what = format!("{name}: {what}");
        let logs = || self.bed.tail();
        let last = waits::follow(&what, &logs, self.api(), named(name), |one| one, wanted);
        let made = async {
            watching.notified().await;
            make.await
        };
        let (mut last, made) = tokio::join!(last, made);
        ((last.remove(0), seen), made)
    }

    /// Creates a Pod whose containers have these specs, with the log folder at `/log`, and waits until it is ready.
    pub async fn pod(&self, name: &str, containers: Value, more: Value) -> Pod {
        self.make_pod(json!({"name": name, "labels": {"app": name}}), containers, more)
            .await
    }

    /// The same with that metadata.
    pub async fn make_pod(&self, metadata: Value, containers: Value, more: Value) -> Pod {
        let mut spec = json!({
            "nodeName": NODE_NAME, "containers": containers, "terminationGracePeriodSeconds": 30,
            "volumes": [{"name": "log", "hostPath": {"path": self.log}}],
        });
        json_patch::merge(&mut spec, &more);
        for list in ["containers", "initContainers"] {
            for container in spec[list].as_array_mut().into_iter().flatten() {
                container["volumeMounts"] = json!([{"name": "log", "mountPath": "/log"}]);
                container["imagePullPolicy"] = json!("IfNotPresent");
            }
        }
        let pod = json!({"metadata": metadata, "spec": spec});
        // Not as the type, which does not have all fields.
        let pod: DynamicObject = serde_json::from_value(pod).unwrap();
        let pods = ApiResource::erase::<Pod>(&());
        let pods: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &pods);
        pods.create(&PostParams::default(), &pod).await.unwrap();
        let all_ready = |pod: &Pod| {
            let statuses = statuses(pod);
            !statuses.is_empty() && statuses.values().all(|status| status.ready)
        };
        let name = pod.name_any();
        let (ready, _) = self.follow(&name, "all containers ready", all_ready).await;
        // A shell that has not set its trap yet, on a busy machine, does not hear TERM.
        for container in pod.data["spec"]["containers"].as_array().into_iter().flatten() {
            let up = format!("{}.up", container["name"].as_str().unwrap());
            if container["command"].to_string().contains(&format!("/log/{up}")) {
                self.mark(&up).await;
            }
        }
        ready
    }

    /// Creates a request as admission leaves it: labels, and what runs now.
    pub async fn request(
        &self,
        name: &str,
        pod: &Pod,
        containers: &[&str],
        spec: Value,
    ) -> ContainerRecreateRequest {
        let running = statuses(pod);
        let containers: Vec<Value> = containers
            .iter()
            .map(|name| {
                let context = running
                    .get(*name)
                    .map(|status| json!({"containerID": status.id, "restartCount": status.restarts}));
                json!({"name": name, "statusContext": context})
            })
            .collect();
        let mut object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": {"name": name, "labels": {
                "crr.apps.kruise.io/active": "true",
                "crr.apps.kruise.io/node-name": NODE_NAME,
                "crr.apps.kruise.io/pod-uid": pod.metadata.uid,
            }},
            "spec": {"podName": pod.metadata.name, "containers": containers},
        });
        json_patch::merge(&mut object["spec"], &spec);
        let object = serde_json::from_value(object).unwrap();
        self.api().create(&PostParams::default(), &object).await.unwrap()
    }

    /// Waits for the end of a request; returns its status and every version of it that was seen.
    pub async fn completed(
        &self,
        name: &str,
    ) -> (ContainerRecreateRequestStatus, Vec<ContainerRecreateRequest>) {
        let (object, seen) = self
            .follow(name, "completed", |request: &ContainerRecreateRequest| {
                request
                    .status
                    .as_ref()
                    .is_some_and(|status| status.completion_time.is_some())
            })
            .await;
        (object.status.unwrap(), seen)
    }

    /// Waits until a container has made a file in its log folder; returns when that was.
    pub async fn mark(&self, file: &str) -> SystemTime {
        let path = self.log.join(file);
        self.until(&format!("file {file} of a container"), || async {
            path.metadata().ok()?.modified().ok()
        })
        .await
    }

    pub fn marked(&self, file: &str) -> bool {
        self.log.join(file).exists()
    }

    pub async fn get_pod(&self, name: &str) -> Pod {
        self.api::<Pod>().get(name).await.unwrap()
    }

    /// Waits for an event with that reason on a container; returns its message.
    pub async fn event(&self, reason: &str, container: &str) -> String {
        let field = format!("{{{container}}}");
        self.until(&format!("event {reason} on {container}"), || async {
            let events = self.api::<Event>().list(&ListParams::default()).await.unwrap();
            let ours = |event: &&Event| {
                event.reason.as_deref() == Some(reason)
                    && event
                        .source
                        .as_ref()
                        .and_then(|s| s.component.as_deref())
                        .is_some_and(|name| name.starts_with("kruise-daemon-"))
                    && event
                        .involved_object
                        .field_path
                        .as_deref()
                        .is_some_and(|path| path.ends_with(&field))
            };
            events
                .items
                .iter()
                .find(ours)
                .and_then(|event| event.message.clone())
        })
        .await
    }

    /// Makes a Service of that name for the Pods made under it.
    pub async fn service(&self, name: &str) {
        let service =
            json!({"metadata": {"name": name}, "spec": {"selector": {"app": name}, "ports": [{"port": 80}]}});
        let service: Service = serde_json::from_value(service).unwrap();
        self.api().create(&PostParams::default(), &service).await.unwrap();
    }

    /// Waits until the Service has one endpoint, which is ready or is not; returns when that was seen.
    pub async fn until_endpoint(&self, what: &str, ready: bool) -> SystemTime {
        self.until(what, || async {
            let slices = self
                .api::<EndpointSlice>()
                .list(&ListParams::default())
                .await
                .unwrap();
            let all = slices.items.into_iter().flat_map(|slice| slice.endpoints);
            let states: Vec<bool> = all
                .map(|one| one.conditions.and_then(|c| c.ready).unwrap_or(true))
                .collect();
            (states == [ready]).then(SystemTime::now)
        })
        .await
    }

    pub async fn patch_status<K: Kind>(&self, name: &str, patch: Value) {
        let patch = Patch::Strategic(patch);
        self.api::<K>()
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

/// What kubelet says of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub id: String,
    pub restarts: i32,
    pub ready: bool,
}

/// What kubelet says of a Pod's containers, init containers included.
pub fn statuses(pod: &Pod) -> BTreeMap<String, Status> {
    let status = pod.status.clone().unwrap_or_default();
    let all = status
        .container_statuses
        .into_iter()
        .chain(status.init_container_statuses)
        .flatten();
    all.map(|one| {
        let id = one.container_id.unwrap_or_default();
        (
            one.name,
            Status {
                id,
                restarts: one.restart_count,
                ready: one.ready,
            },
        )
    })
    .collect()
}

/// Asserts that all containers were recreated.
pub fn assert_succeeded(status: &ContainerRecreateRequestStatus) {
    assert_eq!(status.phase, Phase::Completed);
    let bad = status
        .container_recreate_states
        .iter()
        .find(|state| state.phase != Phase::Succeeded);
    assert!(
        bad.is_none() && !status.container_recreate_states.is_empty(),
        "{status:#?}"
    );
}
