//! A namespace of one test on the node, with CloneSets.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};

use super::super::clone_set_namespace::CloneSetNamespace;
use super::super::connect::connect;
use super::super::pods::{name as name_of, uids_by_name};
use super::super::programs::log_files;
use super::super::settled::is_settled;
use super::{PodMonitor, TestCluster};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A test's own namespace on the shared node.
pub struct NodeNamespace<G> {
    pub cluster: G,
    sets: CloneSetNamespace,
}

impl<G> Deref for NodeNamespace<G> {
    type Target = CloneSetNamespace;
    fn deref(&self) -> &CloneSetNamespace {
        &self.sets
    }
}

impl<G: Deref<Target = TestCluster>> NodeNamespace<G> {
    pub(super) async fn new(cluster: G) -> Self {
        let namespace = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let admin = connect(cluster.node.plane.kubeconfig()).await;
        let sets = CloneSetNamespace::new(admin, namespace, log_files(&cluster.node)).await;
        let accounts = sets.api("", "v1", "ServiceAccount");
        sets.poll_until("the default service account", || async {
            accounts.get_opt("default").await.unwrap()
        })
        .await;
        Self { cluster, sets }
    }

    pub fn claims(&self) -> Api<DynamicObject> {
        self.api("", "v1", "PersistentVolumeClaim")
    }

    /// Runs kubectl in this namespace, which must succeed; returns its output.
    #[track_caller]
    pub fn kubectl(&self, args: &[&str]) -> String {
        let args = [&["--namespace", self.namespace.as_str()], args].concat();
        self.cluster
            .node
            .plane
            .kubectl(&args)
            .unwrap_or_else(|why| panic!("{why:#}"))
    }

    /// Creates a CloneSet with one container `app`; `spec` is merged into its spec.
    pub async fn create_set(&self, name: &str, spec: Value) -> CloneSet {
        self.create_from_template(name, template(name), json!(1), &spec)
            .await
    }

    /// Waits for a status that has observed the newest spec.
    #[track_caller]
    pub fn wait_status(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&CloneSetStatus) -> bool,
    ) -> impl Future<Output = CloneSetStatus> {
        let set_predicate = move |set: &CloneSet| set.status.as_ref().is_some_and(&predicate);
        let reached = self.sets.wait_status(name, what, set_predicate);
        async move { reached.await.status.unwrap() }
    }

    /// Waits until all Pods are updated and available, and the status has no other revision.
    #[track_caller]
    pub fn wait_settled(&self, name: &str) -> impl Future<Output = CloneSetStatus> {
        let fully_settled = |set: &CloneSet| {
            let status = set.status.as_ref().unwrap();
            is_settled(set) && status.current_revision == status.update_revision
        };
        let reached = self
            .sets
            .wait_status(name, "all updated and available", fully_settled);
        async move { reached.await.status.unwrap() }
    }

    /// Creates a CloneSet with one container `app`, and waits until it has settled; returns name and UID of its Pods.
    pub async fn create_settled_set(&self, name: &str, spec: Value) -> BTreeMap<String, String> {
        self.create_set(name, spec).await;
        self.wait_settled(name).await;
        self.pod_uids(name).await
    }

    /// Name and UID of the Pods of a CloneSet.
    pub async fn pod_uids(&self, set: &str) -> BTreeMap<String, String> {
        uids_by_name(self.pods_of(set).await.values())
    }

    /// The Pods of a CloneSet, by name.
    pub async fn pods_of(&self, set: &str) -> BTreeMap<String, Value> {
        let pods = self.sets.pods_of(set).await;
        pods.into_iter().map(|pod| (name_of(&pod), pod)).collect()
    }

    /// Starts to monitor the CloneSet's Pods.
    pub async fn monitor_pods(&self, set: &str) -> PodMonitor {
        PodMonitor::new(self.pods(), &format!("app={set}")).await
    }
}

/// The template of a CloneSet of that name, with one container `app` that ends at TERM at once.
pub fn template(name: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": name } },
        "spec": {
            "terminationGracePeriodSeconds": 10,
            "containers": [{ "name": "app", "image": "kruise-test/term:1", "imagePullPolicy": "IfNotPresent" }],
        },
    })
}
