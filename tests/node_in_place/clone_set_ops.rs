//! CloneSets on the node, and helpers to check their Pods.

use std::ops::Deref;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kruise_api::cloneset::CloneSet;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::Node;
use tokio::sync::{OnceCell, RwLockReadGuard, RwLockWriteGuard};

use crate::fixture::{self, DaemonCluster, TestNamespace};
use crate::manager::Manager;
use crate::pod_meta;
use crate::programs::start_manager;
use crate::settled::is_settled;

static MANAGER: OnceCell<Manager> = OnceCell::const_new();

/// The manager as users run it: with its own account and webhooks.
async fn ensure_manager(node: &Node) {
    let start = || async {
        let registry = &node.runtime.registry;
        registry
            .tag("kruise-test/term:1", "kruise-test/term:1-again")
            .unwrap();
        start_manager(node)
    };
    MANAGER.get_or_init(start).await;
}

/// For a test that leaves daemon and cluster alone.
pub async fn shared_cluster() -> TestNamespace<RwLockReadGuard<'static, DaemonCluster>> {
    let test = fixture::shared_cluster().await;
    ensure_manager(&test.cluster.node).await;
    test
}

/// For a test that stops parts of the bed.
pub async fn exclusive_cluster() -> TestNamespace<RwLockWriteGuard<'static, DaemonCluster>> {
    let test = fixture::exclusive_cluster().await;
    ensure_manager(&test.cluster.node).await;
    test
}

/// A container with that name and image, which records its start and its end in `/log`.
pub fn container(name: &str, image: &str) -> Value {
    let mut container = pod_meta::container(name, &[]);
    container["image"] = json!(image);
    // CloneSets get `Always` by default.
    container["imagePullPolicy"] = json!("IfNotPresent");
    container
}

/// An in-place update strategy; `overrides` is merged into `rollingUpdate`.
pub fn in_place_strategy(overrides: Value) -> Value {
    let mut strategy = json!({"podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1});
    json_patch::merge(&mut strategy, &overrides);
    json!({"type": "RollingUpdate", "rollingUpdate": strategy})
}

/// What tests of this target do with a CloneSet.
pub trait CloneSetOps {
    /// Creates a CloneSet of Pods with these containers, updated in place; `spec` is merged into its spec.
    async fn create_set(&self, name: &str, replicas: i32, containers: Value, spec: Value) -> CloneSet;
    /// Merges a patch into its spec.
    async fn patch_spec(&self, name: &str, spec: Value) -> CloneSet;
    /// Changes its template.
    async fn update_template(&self, name: &str, change: impl FnOnce(&mut Value)) -> CloneSet;
    /// Sets a container's image.
    async fn set_image(&self, name: &str, container: usize, image: &str) -> CloneSet;
    /// Waits for a status that has observed the newest spec.
    async fn wait_status(&self, name: &str, what: &str, predicate: impl Fn(&CloneSet) -> bool) -> CloneSet;
    /// Waits until all Pods are updated and available.
    async fn wait_settled(&self, name: &str) -> CloneSet;
    /// Waits until the message of condition Waiting contains this.
    async fn wait_waiting_message(&self, name: &str, text: &str) -> CloneSet;
    /// The Pods of a CloneSet that are not terminating, by name.
    async fn pods_of(&self, set: &str) -> Vec<Pod>;
    /// The one Pod of a CloneSet.
    async fn single_pod(&self, set: &str) -> Pod;
}

impl<G: Deref<Target = DaemonCluster>> CloneSetOps for TestNamespace<G> {
    async fn create_set(&self, name: &str, replicas: i32, containers: Value, spec: Value) -> CloneSet {
        let mut merged_spec = json!({
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "containers": containers,
                    "volumes": [{"name": "log", "hostPath": {"path": self.log_dir}}],
                },
            },
            "updateStrategy": in_place_strategy(json!({})),
        });
        json_patch::merge(&mut merged_spec, &spec);
        for container in merged_spec["template"]["spec"]["containers"]
            .as_array_mut()
            .unwrap()
        {
            let mounts = container.as_object_mut().unwrap().entry("volumeMounts");
            let mounts = mounts.or_insert_with(|| json!([])).as_array_mut().unwrap();
            mounts.push(json!({"name": "log", "mountPath": "/log"}));
        }
        let set = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": {"name": name}, "spec": merged_spec});
        let set: CloneSet = serde_json::from_value(set).unwrap();
        self.api().create(&PostParams::default(), &set).await.unwrap();
        self.wait_settled(name).await
    }

    async fn patch_spec(&self, name: &str, spec: Value) -> CloneSet {
        let patch = Patch::Merge(json!({"spec": spec}));
        let api = self.api::<CloneSet>();
        api.patch(name, &PatchParams::default(), &patch).await.unwrap()
    }

    async fn update_template(&self, name: &str, change: impl FnOnce(&mut Value)) -> CloneSet {
        let mut template = self.api::<CloneSet>().get(name).await.unwrap().spec.template;
        change(&mut template);
        self.patch_spec(name, json!({"template": template})).await
    }

    async fn set_image(&self, name: &str, container: usize, image: &str) -> CloneSet {
        let change = |template: &mut Value| template["spec"]["containers"][container]["image"] = json!(image);
        self.update_template(name, change).await
    }

    async fn wait_status(&self, name: &str, what: &str, predicate: impl Fn(&CloneSet) -> bool) -> CloneSet {
        let is_current = |set: &CloneSet| {
            let status = set.status.as_ref();
            status.is_some_and(|s| s.observed_generation == set.metadata.generation) && predicate(set)
        };
        self.watch_until(name, what, is_current).await.0
    }

    async fn wait_settled(&self, name: &str) -> CloneSet {
        self.wait_status(name, "all updated and available", is_settled)
            .await
    }

    async fn wait_waiting_message(&self, name: &str, text: &str) -> CloneSet {
        let has_message = |set: &CloneSet| {
            let conditions = &set.status.as_ref().unwrap().conditions;
            let condition = conditions.iter().find(|c| c.type_ == "Waiting");
            condition.is_some_and(|c| c.message.contains(text))
        };
        self.wait_status(name, &format!("it says {text:?}"), has_message)
            .await
    }

    async fn pods_of(&self, set: &str) -> Vec<Pod> {
        let selector = ListParams::default().labels(&format!("app={set}"));
        let mut pods = self.api::<Pod>().list(&selector).await.unwrap().items;
        pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        pods.sort_by_key(ResourceExt::name_any);
        pods
    }

    async fn single_pod(&self, set: &str) -> Pod {
        let mut pods = self.pods_of(set).await;
        assert_eq!(pods.len(), 1, "{pods:#?}");
        pods.remove(0)
    }
}

/// Kubelet's status of a container.
pub fn container_status<'a>(pod: &'a Pod, container: &str) -> &'a ContainerStatus {
    let statuses = pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap();
    statuses.iter().find(|s| s.name == container).unwrap()
}

/// Asserts that a container did not change between these two versions of its Pod.
pub fn assert_container_untouched(before: &Pod, after: &Pod, container: &str) {
    let snapshot = |pod| {
        let status = container_status(pod, container);
        (
            status.container_id.clone(),
            status.restart_count,
            status.image_id.clone(),
        )
    };
    assert_eq!(snapshot(before), snapshot(after), "{container}");
}

/// Asserts that a container was restarted once between these two versions of its Pod, and is running.
pub fn assert_restarted_once(before: &Pod, after: &Pod, container: &str) {
    let (old, new) = (
        container_status(before, container),
        container_status(after, container),
    );
    assert_ne!(old.container_id, new.container_id, "{container}");
    assert_eq!(new.restart_count, old.restart_count + 1, "{container}");
    assert!(
        new.ready && new.state.as_ref().unwrap().running.is_some(),
        "{new:#?}"
    );
}

/// Asserts that it is the same Pod: UID, node and IP address.
pub fn assert_same_pod(before: &Pod, after: &Pod) {
    let snapshot = |pod: &Pod| {
        let (spec, status) = (pod.spec.clone().unwrap(), pod.status.clone().unwrap());
        (
            pod.name_any(),
            pod.uid(),
            spec.node_name,
            status.pod_ip,
            status.start_time,
        )
    };
    assert_eq!(snapshot(before), snapshot(after));
    assert!(snapshot(after).3.is_some(), "it has an address");
}

/// Whether a condition of the Pod is true.
pub fn condition_is_true(pod: &Pod, condition: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let mut found = conditions.filter(|c| c.type_ == condition);
    found.next().is_some_and(|c| c.status == "True")
}
