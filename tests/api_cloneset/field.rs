//! A namespace with CloneSets, and what tests do and see there.

use std::ops::Deref;

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::kubelet;
use crate::pods::{self, text};
use crate::sets::Sets;
use crate::workloads::Witness;
use crate::world::World;

/// A namespace of its own, whose Pods run.
pub struct Field {
    pub world: &'static World,
    sets: Sets,
    kubelet: JoinHandle<()>,
}

impl Deref for Field {
    type Target = Sets;
    fn deref(&self) -> &Sets {
        &self.sets
    }
}

impl Drop for Field {
    fn drop(&mut self) {
        self.kubelet.abort();
    }
}

impl Field {
    pub async fn new(world: &'static World, namespace: &str) -> Self {
        let log = world.plane.dir().join("kruise-manager.log");
        let sets = Sets::new(world.admin().await, namespace.to_owned(), vec![log]).await;
        let account = json!({ "metadata": { "name": "default" } });
        sets.create(&sets.api("", "v1", "ServiceAccount"), account).await;
        Self {
            world,
            kubelet: tokio::spawn(kubelet::play(sets.pods())),
            sets,
        }
    }

    /// From now on nobody runs the Pods.
    pub fn kubelet_goes(&self) {
        self.kubelet.abort();
    }

    /// The Pods run again, in other containers.
    pub fn kubelet_comes_back(&mut self) {
        self.kubelet = tokio::spawn(kubelet::play(self.sets.pods()));
    }

    /// Makes a CloneSet with one container `app`; `spec` is laid over its spec.
    pub async fn set(&self, name: &str, spec: Value) -> CloneSet {
        let template = json!({
            "metadata": { "labels": { "app": name } },
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "app", "image": "example.com/app:1" }],
            },
        });
        self.make(name, template, json!("100%"), &spec).await
    }

    /// The claims that CloneSets own. Those that were given to Pods are for a garbage collector, which few beds have.
    pub async fn claims(&self) -> Vec<Value> {
        let claims = self.api("", "v1", "PersistentVolumeClaim");
        let list = claims.list(&Default::default()).await.unwrap();
        let all = list.items.into_iter().map(|claim| json!(claim));
        all.filter(|c| !pods::deleting(c) && c["metadata"]["ownerReferences"][0]["kind"] == "CloneSet")
            .collect()
    }

    /// What `kubectl describe` says of the CloneSet.
    pub fn described(&self, name: &str) -> String {
        let (set, namespace) = (format!("clone/{name}"), format!("--namespace={}", self.namespace));
        let text = self.world.plane.kubectl(&["describe", &set, &namespace]);
        text.unwrap()
    }

    /// One who watches the CloneSet's Pods from now on.
    pub async fn witness(&self, set: &str) -> Witness {
        Witness::new(self.pods(), &format!("app={set}")).await
    }

    /// Writes that the manager asked for in this namespace, whatever became of them: verb, resource with subresource and
    /// name, and the code of the answer. Dry runs are apart.
    pub fn asked(&self) -> Vec<((String, String, String), i64)> {
        self.of_manager(self.world.plane.writes().unwrap())
    }

    /// The dry runs that it asked for here, in the same form.
    pub fn dry_runs(&self) -> Vec<((String, String, String), i64)> {
        self.of_manager(self.world.plane.dry_runs().unwrap())
    }

    fn of_manager(&self, all: Vec<Value>) -> Vec<((String, String, String), i64)> {
        let ours = all.into_iter().filter(|w| {
            w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
                && w["objectRef"]["namespace"] == self.namespace.as_str()
        });
        ours.map(|w| {
            let (object, sub) = (&w["objectRef"], text(&w["objectRef"]["subresource"]));
            let slash = if sub.is_empty() { "" } else { "/" };
            let resource = format!("{}{slash}{sub}", text(&object["resource"]));
            let body = w["responseObject"]["metadata"]["name"].as_str();
            let name = object["name"].as_str().or(body).unwrap_or_default().to_owned();
            let code = w["responseStatus"]["code"].as_i64().unwrap_or_default();
            ((text(&w["verb"]), resource, name), code)
        })
        .collect()
    }

    /// Accepted writes of the manager in this namespace: verb, resource with subresource, name.
    pub fn writes(&self) -> Vec<(String, String, String)> {
        let accepted = self.asked().into_iter().filter(|(_, code)| *code < 300);
        accepted.map(|(write, _)| write).collect()
    }

    /// Accepted writes of the manager to Pods of this namespace.
    pub fn pod_writes(&self) -> Vec<(String, String, String)> {
        let mut all = self.writes();
        all.retain(|(_, resource, _)| resource.starts_with("pods"));
        all
    }
}

/// Name and UID of each.
pub fn identities(pods: &[Value]) -> Vec<(String, String)> {
    pods::identities(pods).into_iter().collect()
}
