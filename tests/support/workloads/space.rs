//! A namespace of one test, with CloneSets, and what tests do and see there.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};

use kruise::api::cloneset::{CloneSet, CloneSetStatus};
use kruise::cluster::Cluster;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

use super::{Bed, Witness};
use crate::connect::connect;
use crate::pods::{identities, text};
use crate::untyped::untyped;
use crate::waits::{self, named};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A namespace of its own on the shared node.
pub struct Space<G> {
    pub bed: G,
    pub admin: Cluster,
    pub namespace: String,
}

impl<G: Deref<Target = Bed>> Space<G> {
    pub(super) async fn new(bed: G) -> Self {
        let namespace = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let admin = connect(bed.node.plane.kubeconfig()).await;
        let object = json!({ "metadata": { "name": namespace } });
        let namespaces = untyped(&admin, "", "v1", "Namespace", None);
        let object = serde_json::from_value(object).unwrap();
        namespaces.create(&PostParams::default(), &object).await.unwrap();
        let space = Self {
            bed,
            admin,
            namespace,
        };
        let accounts = space.api("", "v1", "ServiceAccount");
        space
            .until("the default service account", || async {
                accounts.get_opt("default").await.unwrap()
            })
            .await;
        space
    }

    pub fn sets(&self) -> Api<CloneSet> {
        Api::namespaced(self.admin.client.clone(), &self.namespace)
    }

    pub fn pods(&self) -> Api<DynamicObject> {
        self.api("", "v1", "Pod")
    }

    pub fn claims(&self) -> Api<DynamicObject> {
        self.api("", "v1", "PersistentVolumeClaim")
    }

    pub fn api(&self, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
        untyped(&self.admin, group, version, kind, Some(&self.namespace))
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

    /// Creates an object of any kind.
    pub async fn create(&self, api: &Api<DynamicObject>, object: Value) -> DynamicObject {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    /// Makes a CloneSet with one container `app`; `spec` is laid over its spec.
    pub async fn set(&self, name: &str, spec: Value) -> CloneSet {
        let mut whole = json!({
            "replicas": 3,
            "selector": { "matchLabels": { "app": name } },
            "template": template(name),
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } },
        });
        json_patch::merge(&mut whole, &spec);
        let object = json!({ "metadata": { "name": name }, "spec": whole });
        let object: CloneSet = serde_json::from_value(object).unwrap();
        self.sets().create(&PostParams::default(), &object).await.unwrap()
    }

    /// A merge patch of the CloneSet.
    pub async fn edit(&self, name: &str, patch: Value) -> CloneSet {
        let patch = Patch::Merge(patch);
        self.sets()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .unwrap()
    }

    /// Gives container `app` another image, and lays `spec` over the CloneSet's spec in the same write.
    pub async fn image_and(&self, name: &str, image: &str, spec: Value) -> CloneSet {
        let mut template = self.sets().get(name).await.unwrap().spec.template;
        template["spec"]["containers"][0]["image"] = json!(image);
        let mut whole = json!({ "template": template });
        json_patch::merge(&mut whole, &spec);
        self.edit(name, json!({ "spec": whole })).await
    }

    /// Gives container `app` another image.
    pub async fn image(&self, name: &str, image: &str) -> CloneSet {
        self.image_and(name, image, json!({})).await
    }

    /// Waits for a status that speaks of the newest spec.
    #[track_caller]
    pub fn status(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&CloneSetStatus) -> bool,
    ) -> impl Future<Output = CloneSetStatus> {
        let caller = Location::caller();
        let holds = move |objects: &[&Value]| {
            let set: Option<CloneSet> = objects
                .first()
                .and_then(|o| serde_json::from_value((*o).clone()).ok());
            set.is_some_and(|set| {
                let seen = set.status.as_ref().and_then(|s| s.observed_generation);
                seen == set.metadata.generation && set.status.as_ref().is_some_and(&wanted)
            })
        };
        let config = named(name);
        let sets = self.api("apps.kruise.io", "v1beta1", "CloneSet");
        let what = format!("{name}: {what}");
        async move {
            let found = self.watch(caller, sets, config, &what, holds).await;
            serde_json::from_value(found[0]["status"].clone()).unwrap()
        }
    }

    /// Waits until all Pods are updated and available.
    #[track_caller]
    pub fn settled(&self, name: &str) -> impl Future<Output = CloneSetStatus> {
        let (sets, name) = (self.sets(), name.to_owned());
        let caller = Location::caller();
        async move {
            let wanted = sets.get(&name).await.unwrap().spec.wanted();
            let what = format!("all {wanted} updated and available (asked at {caller})");
            self.status(&name, &what, |status| {
                status.replicas == wanted
                    && status.updated_replicas == wanted
                    && status.available_replicas == wanted
                    && status.updated_available_replicas == Some(wanted)
                    && status.current_revision == status.update_revision
            })
            .await
        }
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
        let selector = ListParams::default().labels(&format!("app={set}"));
        let list = self.pods().list(&selector).await.unwrap();
        list.items
            .into_iter()
            .map(|pod| (pod.name_any(), json!(pod)))
            .collect()
    }

    /// Waits until the Pods of a CloneSet are as wanted.
    #[track_caller]
    pub fn until_pods(
        &self,
        set: &str,
        what: &str,
        wanted: impl Fn(&[&Value]) -> bool,
    ) -> impl Future<Output = Vec<Value>> {
        let (caller, what) = (Location::caller(), format!("Pods of {set}: {what}"));
        let config = watcher::Config::default().labels(&format!("app={set}"));
        let pods = self.pods();
        async move { self.watch(caller, pods, config, &what, wanted).await }
    }

    /// Waits until one of the Pods is as wanted.
    #[track_caller]
    pub fn until_pod(
        &self,
        set: &str,
        name: &str,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> impl Future<Output = Value> {
        let (caller, what) = (Location::caller(), format!("Pod {name} of {set}: {what}"));
        let config = named(name);
        let pods = self.pods();
        async move {
            let holds = |pods: &[&Value]| pods.first().is_some_and(|pod| wanted(pod));
            self.watch(caller, pods, config, &what, holds).await.remove(0)
        }
    }

    /// Waits for an event about an object, with that reason; its message.
    #[track_caller]
    pub fn event(&self, reason: &str, about: &str) -> impl Future<Output = String> {
        let (caller, what) = (Location::caller(), format!("event {reason} about {about}"));
        let fields = format!("reason={reason},involvedObject.name={about}");
        let config = watcher::Config::default().fields(&fields);
        let events = self.api("", "v1", "Event");
        async move {
            let found = self
                .watch(caller, events, config, &what, |events| !events.is_empty())
                .await;
            text(&found[0]["message"])
        }
    }

    /// One who watches the CloneSet's Pods from now on.
    pub async fn witness(&self, set: &str) -> Witness {
        Witness::new(self.pods(), &format!("app={set}")).await
    }

    /// Asks until there is an answer; for what no watch tells of.
    pub async fn until<T, F: Future<Output = Option<T>>>(&self, what: &str, ask: impl Fn() -> F) -> T {
        waits::until(what, &|| self.bed.tail(), ask).await
    }

    /// Follows objects until they are, taken together, as wanted.
    async fn watch(
        &self,
        caller: &Location<'_>,
        api: Api<DynamicObject>,
        config: watcher::Config,
        what: &str,
        wanted: impl Fn(&[&Value]) -> bool,
    ) -> Vec<Value> {
        let (what, read) = (format!("{caller}: {what}"), |object| json!(object));
        waits::follow(&what, &|| self.bed.tail(), api, config, read, wanted).await
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
