//! A namespace with CloneSets, and helpers to change and observe them.

use std::ops::Deref;

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::clone_set_namespace::CloneSetNamespace;
use crate::fake_kubelet;
use crate::manager_requests::{self, ManagerRequest};
use crate::pods;
use crate::test_cluster::TestCluster;
use crate::workloads::PodMonitor;

/// A test's own namespace, whose Pods run.
pub struct Fixture {
    pub cluster: &'static TestCluster,
    sets: CloneSetNamespace,
    kubelet: JoinHandle<()>,
}

impl Deref for Fixture {
    type Target = CloneSetNamespace;
    fn deref(&self) -> &CloneSetNamespace {
        &self.sets
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.kubelet.abort();
    }
}

impl Fixture {
    pub async fn new(cluster: &'static TestCluster, namespace: &str) -> Self {
        let log = cluster.plane.dir().join("kruise-manager.log");
        let sets = CloneSetNamespace::new(cluster.admin().await, namespace.to_owned(), vec![log]).await;
        let account = json!({ "metadata": { "name": "default" } });
        sets.create(&sets.api("", "v1", "ServiceAccount"), account).await;
        Self {
            cluster,
            kubelet: tokio::spawn(fake_kubelet::run_kubelet(sets.pods())),
            sets,
        }
    }

    /// Stops the fake kubelet.
    pub fn stop_kubelet(&self) {
        self.kubelet.abort();
    }

    /// Starts the fake kubelet again; all containers are new.
    pub fn restart_kubelet(&mut self) {
        self.kubelet = tokio::spawn(fake_kubelet::run_kubelet(self.sets.pods()));
    }

    /// Creates a CloneSet with one container `app`; `spec` is merged into its spec.
    pub async fn create_cloneset(&self, name: &str, spec: Value) -> CloneSet {
        let template = json!({
            "metadata": { "labels": { "app": name } },
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "app", "image": "example.com/app:1" }],
            },
        });
        self.create_from_template(name, template, json!("100%"), &spec)
            .await
    }

    /// Claims owned by CloneSets. Claims owned by Pods are left to a garbage collector, which few beds have.
    pub async fn owned_claims(&self) -> Vec<Value> {
        let claims = self.api("", "v1", "PersistentVolumeClaim");
        let list = claims.list(&Default::default()).await.unwrap();
        let all = list.items.into_iter().map(|claim| json!(claim));
        all.filter(|c| !pods::is_terminating(c) && c["metadata"]["ownerReferences"][0]["kind"] == "CloneSet")
            .collect()
    }

    /// Output of `kubectl describe` for the CloneSet.
    pub fn describe(&self, name: &str) -> String {
        let (set, namespace) = (format!("clone/{name}"), format!("--namespace={}", self.namespace));
        let text = self.cluster.plane.kubectl(&["describe", &set, &namespace]);
        text.unwrap()
    }

    /// Starts to monitor the CloneSet's Pods.
    pub async fn watch_pods(&self, set: &str) -> PodMonitor {
        PodMonitor::new(self.pods(), &format!("app={set}")).await
    }

    /// The manager's writes in this namespace, successful or not, without dry runs.
    pub fn write_requests(&self) -> Vec<ManagerRequest> {
        manager_requests::write_requests(&self.cluster.plane, &self.namespace)
    }

    /// The manager's dry runs in this namespace.
    pub fn dry_runs(&self) -> Vec<ManagerRequest> {
        manager_requests::dry_runs(&self.cluster.plane, &self.namespace)
    }

    /// Accepted writes of the manager in this namespace: verb, resource with subresource, name.
    pub fn accepted_writes(&self) -> Vec<(String, String, String)> {
        let accepted = self.write_requests().into_iter().filter(|(_, code)| *code < 300);
        accepted.map(|(write, _)| write).collect()
    }

    /// Accepted writes of the manager to Pods of this namespace.
    pub fn pod_writes(&self) -> Vec<(String, String, String)> {
        let mut all = self.accepted_writes();
        all.retain(|(_, resource, _)| resource.starts_with("pods"));
        all
    }
}

/// Name and UID of each Pod.
pub fn identities(pods: &[Value]) -> Vec<(String, String)> {
    pods::uids_by_name(pods).into_iter().collect()
}
