//! A namespace of one test on the node, with CloneSets.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kube::api::{Api, DynamicObject};
use serde_json::{Value, json};

use super::super::connect::connect;
use super::super::pods::{identities, name as name_of};
use super::super::programs::logs;
use super::super::sets::Sets;
use super::super::settled::settled;
use super::{Bed, Witness};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A namespace of its own on the shared node.
pub struct Space<G> {
    pub bed: G,
    sets: Sets,
}

impl<G> Deref for Space<G> {
    type Target = Sets;
    fn deref(&self) -> &Sets {
        &self.sets
    }
}

impl<G: Deref<Target = Bed>> Space<G> {
    pub(super) async fn new(bed: G) -> Self {
        let namespace = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let admin = connect(bed.node.plane.kubeconfig()).await;
        let sets = Sets::new(admin, namespace, logs(&bed.node)).await;
        let accounts = sets.api("", "v1", "ServiceAccount");
        sets.until("the default service account", || async {
            accounts.get_opt("default").await.unwrap()
        })
        .await;
        Self { bed, sets }
    }

    pub fn claims(&self) -> Api<DynamicObject> {
        self.api("", "v1", "PersistentVolumeClaim")
    }

    /// kubectl in this namespace, which must succeed; what it prints.
    #[track_caller]
    pub fn kubectl(&self, args: &[&str]) -> String {
        let args = [&["--namespace", self.namespace.as_str()], args].concat();
        self.bed
            .node
            .plane
            .kubectl(&args)
            .unwrap_or_else(|why| panic!("{why:#}"))
    }

    /// Makes a CloneSet with one container `app`; `spec` is laid over its spec.
    pub async fn set(&self, name: &str, spec: Value) -> CloneSet {
        self.make(name, template(name), json!(1), &spec).await
    }

    /// Waits for a status that speaks of the newest spec.
    #[track_caller]
    pub fn status(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&CloneSetStatus) -> bool,
    ) -> impl Future<Output = CloneSetStatus> {
        let of_set = move |set: &CloneSet| set.status.as_ref().is_some_and(&wanted);
        let seen = self.sets.status(name, what, of_set);
        async move { seen.await.status.unwrap() }
    }

    /// Waits until all Pods are updated and available, and no other revision is known.
    #[track_caller]
    pub fn settled(&self, name: &str) -> impl Future<Output = CloneSetStatus> {
        let done = |set: &CloneSet| {
            let status = set.status.as_ref().unwrap();
            settled(set) && status.current_revision == status.update_revision
        };
        let seen = self.sets.status(name, "all updated and available", done);
        async move { seen.await.status.unwrap() }
    }

    /// Makes a CloneSet with one container `app`, and waits until it has settled; name and UID of its Pods.
    pub async fn settled_set(&self, name: &str, spec: Value) -> BTreeMap<String, String> {
        self.set(name, spec).await;
        self.settled(name).await;
        self.identities(name).await
    }

    /// Name and UID of the Pods of a CloneSet.
    pub async fn identities(&self, set: &str) -> BTreeMap<String, String> {
        identities(self.pods_of(set).await.values())
    }

    /// The Pods of a CloneSet, by name.
    pub async fn pods_of(&self, set: &str) -> BTreeMap<String, Value> {
        let pods = self.sets.pods_of(set).await;
        pods.into_iter().map(|pod| (name_of(&pod), pod)).collect()
    }

    /// One who watches the CloneSet's Pods from now on.
    pub async fn witness(&self, set: &str) -> Witness {
        Witness::new(self.pods(), &format!("app={set}")).await
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
