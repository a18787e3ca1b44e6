//! A namespace with the SidecarSet of the same name, and with injected Pods that run.

use std::fmt::Display;
use std::ops::Deref;
use std::panic::Location;
use std::time::Duration;

use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;
use tokio::task::JoinHandle;

use crate::clone_set_namespace::CloneSetNamespace;
use crate::connect::connect;
use crate::fixture::{image, names};
use crate::manager_requests::{self, ManagerRequest};
use crate::pods::{condition, condition_is_true, container_status};
use crate::{fake_kubelet, waits};
use support::untyped::untyped;

/// The container of the sets.
pub const SIDECAR: &str = "side";

/// A test's own namespace.
pub struct SidecarNamespace {
    plane: &'static ControlPlane,
    objects: CloneSetNamespace,
    kubelet: JoinHandle<()>,
}

impl Deref for SidecarNamespace {
    type Target = CloneSetNamespace;
    fn deref(&self) -> &CloneSetNamespace {
        &self.objects
    }
}

impl Drop for SidecarNamespace {
    fn drop(&mut self) {
        self.kubelet.abort();
    }
}

impl SidecarNamespace {
    /// Creates the namespace.
    pub async fn new(plane: &'static ControlPlane, name: &str) -> Self {
        let log = plane.dir().join("kruise-manager.log");
        let admin = connect(plane.kubeconfig()).await;
        let objects = CloneSetNamespace::new(admin, name.to_owned(), vec![log]).await;
        let accounts = objects.api("", "v1", "ServiceAccount");
        let default = || async { accounts.get_opt("default").await.unwrap() };
        objects.poll_until("the default service account", default).await;
        Self {
            plane,
            kubelet: tokio::spawn(fake_kubelet::run_kubelet(objects.pods())),
            objects,
        }
    }

    /// Stops the fake kubelet: Pods stay as they are.
    pub fn stop_kubelet(&self) {
        self.kubelet.abort();
    }

    /// Starts the fake kubelet again.
    pub fn restart_kubelet(&mut self) {
        self.kubelet = tokio::spawn(fake_kubelet::run_kubelet(self.objects.pods()));
    }

    pub fn sidecar_sets(&self) -> Api<DynamicObject> {
        untyped(&self.admin, "apps.kruise.io", "v1beta1", "SidecarSet", None)
    }

    /// Creates the set, whose container [`SIDECAR`] has image `side:1`, for Pods of this namespace with label `app` of
    /// the same name; `spec` is merged into its spec. Returns it when new Pods are injected.
    pub async fn create_set(&self, spec: Value) -> Value {
        let name = self.namespace.as_str();
        let mut merged = json!({
            "selector": { "matchLabels": { "app": name } },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": name } },
            "containers": [{ "name": SIDECAR, "image": "side:1" }],
        });
        json_patch::merge(&mut merged, &spec);
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": name }, "spec": merged });
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let sets = self.sidecar_sets();
        // The webhook takes a moment to be used.
        let create = || async {
            let created = sets.create(&PostParams::default(), &object).await;
            created.inspect_err(|why| println!("{why}")).ok()
        };
        self.poll_until("the set is admitted", create).await;
        self.wait_injected(|pod| names(pod).contains(&SIDECAR)).await;
        self.wait_set("a revision", |set| set["status"]["latestRevision"].is_string())
            .await
    }

    /// Merges a patch into the set's spec.
    pub async fn patch_set(&self, spec: Value) {
        let patch = Patch::Merge(json!({ "spec": spec }));
        let params = PatchParams::default();
        self.sidecar_sets()
            .patch(&self.namespace, &params, &patch)
            .await
            .unwrap();
    }

    /// Sets the image of the sidecar.
    pub async fn set_image(&self, image: &str) {
        self.patch_set(json!({ "containers": [{ "name": SIDECAR, "image": image }] }))
            .await;
    }

    fn pod(&self, name: &str) -> DynamicObject {
        let pod = json!({
            "metadata": { "name": name, "labels": { "app": self.namespace } },
            "spec": { "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                "containers": [{ "name": "app", "image": "app:1" }] },
        });
        serde_json::from_value(pod).unwrap()
    }

    /// Waits until new Pods are as `predicate` says.
    #[track_caller]
    pub fn wait_injected(&self, predicate: impl Fn(&Value) -> bool) -> impl Future<Output = ()> {
        let what = format!("{}: a new Pod as it should be", Location::caller());
        let (pods, pod) = (self.pods(), self.pod("dry-run"));
        let params = PostParams {
            dry_run: true,
            field_manager: None,
        };
        async move {
            let create = || async {
                let created = pods.create(&params, &pod).await.unwrap();
                predicate(&json!(created)).then_some(())
            };
            self.poll_until(&what, create).await;
        }
    }

    /// Creates a Pod, whatever it gets.
    pub async fn create_pod(&self, name: &str) {
        let params = PostParams::default();
        self.pods().create(&params, &self.pod(name)).await.unwrap();
    }

    /// Creates Pods `web-0` and so on, and waits until they run with their sidecars; returns their names.
    pub async fn create_pods(&self, count: usize) -> Vec<String> {
        let all: Vec<String> = (0..count).map(|at| format!("web-{at}")).collect();
        for name in &all {
            self.create_pod(name).await;
        }
        self.wait_sidecars("side:1", &all).await;
        all
    }

    /// Waits until these Pods run this image of the sidecar, and are ready.
    #[track_caller]
    pub fn wait_sidecars(&self, image: &str, pods: &[String]) -> impl Future<Output = Vec<Value>> {
        let (image, expected) = (image.to_owned(), pods.to_vec());
        let all_run = move |pods: &[&Value]| {
            let mut missing = expected.iter();
            missing.all(|name| {
                let mut pods = pods.iter();
                pods.any(|pod| pod["metadata"]["name"] == name.as_str() && runs_sidecar(pod, &image))
            })
        };
        self.wait_pods(&self.namespace, "the sidecars run that image", all_run)
    }

    /// Waits until `predicate` holds for the set, and its status has observed the newest spec.
    #[track_caller]
    pub fn wait_set(
        &self,
        what: impl Display,
        predicate: impl Fn(&Value) -> bool,
    ) -> impl Future<Output = Value> {
        let what = format!("{}: SidecarSet {}: {what}", Location::caller(), self.namespace);
        let (sets, config) = (self.sidecar_sets(), waits::by_name(&self.namespace));
        async move {
            let is_so = |found: &[&Value]| {
                found.first().is_some_and(|set| {
                    set["status"]["observedGeneration"] == set["metadata"]["generation"] && predicate(set)
                })
            };
            let to_json = |one: DynamicObject| json!(one);
            let mut last = waits::watch_until(&what, &|| self.tail(), sets, config, to_json, is_so).await;
            last.remove(0)
        }
    }

    /// Waits until the status counts this many matched, updated and ready Pods, and Pods without the sidecars.
    #[track_caller]
    pub fn wait_counts(&self, counts: [i64; 4]) -> impl Future<Output = Value> {
        let fields = ["matchedPods", "updatedPods", "readyPods", "notInjectedPods"];
        self.wait_set(format!("{fields:?} are {counts:?}"), move |set| {
            fields.map(|field| set["status"][field].as_i64().unwrap_or_default()) == counts
        })
    }

    /// Waits until condition `Waiting` of the set has this reason, and a message with this text.
    #[track_caller]
    pub fn wait_waiting(&self, reason: &str, text: &str) -> impl Future<Output = Value> {
        let (reason, text) = (reason.to_owned(), text.to_owned());
        self.wait_set(format!("Waiting: {reason}: {text}"), move |set| {
            let waiting = condition(set, "Waiting");
            let message = waiting["message"].as_str().unwrap_or_default();
            waiting["reason"] == *reason && message.contains(&text)
        })
    }

    /// Merges labels into those of a Pod.
    pub async fn set_labels(&self, pod: &str, labels: Value) {
        let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
        self.pods()
            .patch(pod, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    /// The manager's writes in this namespace, successful or not, without dry runs.
    pub fn write_requests(&self) -> Vec<ManagerRequest> {
        manager_requests::write_requests(self.plane, &self.namespace)
    }

    /// How often the manager has updated a Pod.
    pub fn updates(&self, pod: &str) -> usize {
        let codes = self.patch_codes("pods", pod);
        codes.iter().filter(|code| **code == 200).count()
    }

    /// Shortest time between two of the manager's writes of a Pod; `None` if there are fewer.
    pub fn shortest_pause(&self, resource: &str, pod: &str) -> Option<Duration> {
        let times = manager_requests::write_times(self.plane, &self.namespace, resource, pod);
        let pauses = times.windows(2).map(|two| two[1].duration_since(two[0]));
        pauses.map(|pause| pause.unsigned_abs()).min()
    }

    /// Status codes of the manager's patches of a Pod, in their order; of its status if `resource` is `pods/status`.
    pub fn patch_codes(&self, resource: &str, pod: &str) -> Vec<i64> {
        let all = self.write_requests().into_iter();
        all.filter(|((_, what, name), _)| what == resource && name == pod)
            .map(|(_, code)| code)
            .collect()
    }
}

/// Whether the Pod's spec has this image of the sidecar.
pub fn has_sidecar(pod: &Value, expected: &str) -> bool {
    image(pod, SIDECAR) == expected
}

/// Whether the Pod's spec has this image of the sidecar, and it runs and is ready.
pub fn runs_sidecar(pod: &Value, expected: &str) -> bool {
    let status = container_status(pod, SIDECAR);
    has_sidecar(pod, expected) && status.image == expected && status.ready && condition_is_true(pod, "Ready")
}
