//! CloneSets on the node, and words to ask what became of their Pods.

use std::ops::Deref;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kruise_api::cloneset::CloneSet;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::Node;
use tokio::sync::{OnceCell, RwLockReadGuard, RwLockWriteGuard};

use crate::bed::{self, Bed, Test};
use crate::manager::Manager;
use crate::pod;
use crate::programs::manage;
use crate::settled::settled;

static MANAGER: OnceCell<Manager> = OnceCell::const_new();

/// The manager as users run it: as its own account, with its webhooks.
async fn managed(node: &Node) {
    let start = || async {
        let registry = &node.runtime.registry;
        registry
            .tag("kruise-test/term:1", "kruise-test/term:1-again")
            .unwrap();
        manage(node)
    };
    MANAGER.get_or_init(start).await;
}

/// A test that leaves daemon and cluster alone.
pub async fn shared() -> Test<RwLockReadGuard<'static, Bed>> {
    let test = bed::shared().await;
    managed(&test.bed.node).await;
    test
}

/// A test that ends parts of the bed.
pub async fn alone() -> Test<RwLockWriteGuard<'static, Bed>> {
    let test = bed::alone().await;
    managed(&test.bed.node).await;
    test
}

/// A container of that name and image, which notes its beginning and its end in `/log`.
pub fn container(name: &str, image: &str) -> Value {
    let mut container = pod::container(name, &[]);
    container["image"] = json!(image);
    // CloneSets get `Always` where nothing is said.
    container["imagePullPolicy"] = json!("IfNotPresent");
    container
}

/// A strategy of updates in place; `rolling` is laid over it.
pub fn in_place(rolling: Value) -> Value {
    let mut strategy = json!({"podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1});
    json_patch::merge(&mut strategy, &rolling);
    json!({"type": "RollingUpdate", "rollingUpdate": strategy})
}

/// What tests of this target do with a CloneSet.
pub trait Field {
    /// Makes a CloneSet of Pods with these containers, updated in place; `spec` is laid over its spec.
    async fn set(&self, name: &str, replicas: i32, containers: Value, spec: Value) -> CloneSet;
    /// A merge patch of its spec.
    async fn edit(&self, name: &str, spec: Value) -> CloneSet;
    /// Changes its template: what is changed is its spec's.
    async fn template(&self, name: &str, change: impl FnOnce(&mut Value)) -> CloneSet;
    /// Gives a container another image.
    async fn image(&self, name: &str, container: usize, image: &str) -> CloneSet;
    /// Waits for a status that speaks of the newest spec.
    async fn status(&self, name: &str, what: &str, wanted: impl Fn(&CloneSet) -> bool) -> CloneSet;
    /// Waits until all Pods are updated and available.
    async fn settled(&self, name: &str) -> CloneSet;
    /// Waits until condition Waiting says this.
    async fn says(&self, name: &str, words: &str) -> CloneSet;
    /// The Pods of a CloneSet that are not being deleted, by name.
    async fn pods_of(&self, set: &str) -> Vec<Pod>;
    /// The one Pod of a CloneSet.
    async fn pod_of(&self, set: &str) -> Pod;
}

impl<G: Deref<Target = Bed>> Field for Test<G> {
    async fn set(&self, name: &str, replicas: i32, containers: Value, spec: Value) -> CloneSet {
        let mut whole = json!({
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "containers": containers,
                    "volumes": [{"name": "log", "hostPath": {"path": self.log}}],
                },
            },
            "updateStrategy": in_place(json!({})),
        });
        json_patch::merge(&mut whole, &spec);
        for container in whole["template"]["spec"]["containers"].as_array_mut().unwrap() {
            let mounts = container.as_object_mut().unwrap().entry("volumeMounts");
            let mounts = mounts.or_insert_with(|| json!([])).as_array_mut().unwrap();
            mounts.push(json!({"name": "log", "mountPath": "/log"}));
        }
        let set = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": {"name": name}, "spec": whole});
        let set: CloneSet = serde_json::from_value(set).unwrap();
        self.api().create(&PostParams::default(), &set).await.unwrap();
        self.settled(name).await
    }

    async fn edit(&self, name: &str, spec: Value) -> CloneSet {
        let patch = Patch::Merge(json!({"spec": spec}));
        let api = self.api::<CloneSet>();
        api.patch(name, &PatchParams::default(), &patch).await.unwrap()
    }

    async fn template(&self, name: &str, change: impl FnOnce(&mut Value)) -> CloneSet {
        let mut template = self.api::<CloneSet>().get(name).await.unwrap().spec.template;
        change(&mut template);
        self.edit(name, json!({"template": template})).await
    }

    async fn image(&self, name: &str, container: usize, image: &str) -> CloneSet {
        let change = |template: &mut Value| template["spec"]["containers"][container]["image"] = json!(image);
        self.template(name, change).await
    }

    async fn status(&self, name: &str, what: &str, wanted: impl Fn(&CloneSet) -> bool) -> CloneSet {
        let of_this_spec = |set: &CloneSet| {
            let status = set.status.as_ref();
            status.is_some_and(|s| s.observed_generation == set.metadata.generation) && wanted(set)
        };
        self.follow(name, what, of_this_spec).await.0
    }

    async fn settled(&self, name: &str) -> CloneSet {
        self.status(name, "all updated and available", settled).await
    }

    async fn says(&self, name: &str, words: &str) -> CloneSet {
        let told = |set: &CloneSet| {
            let conditions = &set.status.as_ref().unwrap().conditions;
            let condition = conditions.iter().find(|c| c.type_ == "Waiting");
            condition.is_some_and(|c| c.message.contains(words))
        };
        self.status(name, &format!("it says {words:?}"), told).await
    }

    async fn pods_of(&self, set: &str) -> Vec<Pod> {
        let selector = ListParams::default().labels(&format!("app={set}"));
        let mut pods = self.api::<Pod>().list(&selector).await.unwrap().items;
        pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        pods.sort_by_key(ResourceExt::name_any);
        pods
    }

    async fn pod_of(&self, set: &str) -> Pod {
        let mut pods = self.pods_of(set).await;
        assert_eq!(pods.len(), 1, "{pods:#?}");
        pods.remove(0)
    }
}

/// What kubelet says of a container.
pub fn status<'a>(pod: &'a Pod, container: &str) -> &'a ContainerStatus {
    let statuses = pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap();
    statuses.iter().find(|s| s.name == container).unwrap()
}

/// Asserts that a container was not touched between these two looks at its Pod.
pub fn same_container(before: &Pod, after: &Pod, container: &str) {
    let look = |pod| {
        let status = status(pod, container);
        (
            status.container_id.clone(),
            status.restart_count,
            status.image_id.clone(),
        )
    };
    assert_eq!(look(before), look(after), "{container}");
}

/// Asserts that a container was restarted once, and runs, between these two looks at its Pod.
pub fn restarted_once(before: &Pod, after: &Pod, container: &str) {
    let (old, new) = (status(before, container), status(after, container));
    assert_ne!(old.container_id, new.container_id, "{container}");
    assert_eq!(new.restart_count, old.restart_count + 1, "{container}");
    assert!(
        new.ready && new.state.as_ref().unwrap().running.is_some(),
        "{new:#?}"
    );
}

/// Asserts that it is the same Pod: its identity, place and address.
pub fn same_pod(before: &Pod, after: &Pod) {
    let look = |pod: &Pod| {
        let (spec, status) = (pod.spec.clone().unwrap(), pod.status.clone().unwrap());
        (
            pod.name_any(),
            pod.uid(),
            spec.node_name,
            status.pod_ip,
            status.start_time,
        )
    };
    assert_eq!(look(before), look(after));
    assert!(look(after).3.is_some(), "it has an address");
}

/// Whether a condition of the Pod is true.
pub fn holds(pod: &Pod, condition: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let mut found = conditions.filter(|c| c.type_ == condition);
    found.next().is_some_and(|c| c.status == "True")
}
