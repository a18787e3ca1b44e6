//! The CloneSets of a namespace and their Pods: what tests do with them, and wait for.

use std::panic::Location;
use std::path::PathBuf;

use kruise_api::cloneset::CloneSet;
use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

use super::settled::settled;
use super::untyped::untyped;
use super::waits::{self, named, tails};

/// A namespace, as its administrator.
pub struct Sets {
    pub admin: Cluster,
    pub namespace: String,
    /// Where the programs log that work there.
    logs: Vec<PathBuf>,
}

impl Sets {
    /// Makes the namespace.
    pub async fn new(admin: Cluster, namespace: String, logs: Vec<PathBuf>) -> Self {
        let object = json!({ "metadata": { "name": namespace } });
        let sets = Self {
            admin,
            namespace,
            logs,
        };
        let namespaces = untyped(&sets.admin, "", "v1", "Namespace", None);
        sets.create(&namespaces, object).await;
        sets
    }

    pub fn sets(&self) -> Api<CloneSet> {
        Api::namespaced(self.admin.client.clone(), &self.namespace)
    }

    pub fn pods(&self) -> Api<DynamicObject> {
        self.api("", "v1", "Pod")
    }

    pub fn api(&self, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
        untyped(&self.admin, group, version, kind, Some(&self.namespace))
    }

    /// Creates an object of any kind.
    pub async fn create(&self, api: &Api<DynamicObject>, object: Value) -> DynamicObject {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    /// Makes a CloneSet of three Pods of that template, updated in place, at most so many at a time; `spec` is laid
    /// over its spec.
    pub async fn make(&self, name: &str, template: Value, at_a_time: Value, spec: &Value) -> CloneSet {
        let mut whole = json!({
            "replicas": 3,
            "selector": { "matchLabels": { "app": name } },
            "template": template,
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": at_a_time } },
        });
        json_patch::merge(&mut whole, spec);
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
        wanted: impl Fn(&CloneSet) -> bool,
    ) -> impl Future<Output = CloneSet> {
        let what = format!("{}: {name}: {what}", Location::caller());
        let (sets, config) = (self.sets(), named(name));
        async move {
            let wanted = |found: &[&CloneSet]| {
                found.first().is_some_and(|set| {
                    let status = set.status.as_ref();
                    status.is_some_and(|s| s.observed_generation == set.metadata.generation) && wanted(set)
                })
            };
            let mut last = waits::follow(&what, &|| self.tail(), sets, config, |set| set, wanted).await;
            last.remove(0)
        }
    }

    /// Waits until all Pods are updated and available.
    #[track_caller]
    pub fn settled(&self, name: &str) -> impl Future<Output = CloneSet> {
        self.status(name, "all updated and available", settled)
    }

    /// Waits until the Pods of a CloneSet are as wanted.
    #[track_caller]
    pub fn until_pods(
        &self,
        set: &str,
        what: &str,
        wanted: impl Fn(&[&Value]) -> bool,
    ) -> impl Future<Output = Vec<Value>> {
        let what = format!("{}: Pods of {set}: {what}", Location::caller());
        self.watch(what, self.pods(), selected(set), wanted)
    }

    /// Waits until one of the Pods is as wanted.
    #[track_caller]
    pub fn until_pod(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> impl Future<Output = Value> {
        let what = format!("{}: Pod {name}: {what}", Location::caller());
        let wanted = move |pods: &[&Value]| pods.first().is_some_and(|pod| wanted(pod));
        let last = self.watch(what, self.pods(), named(name), wanted);
        async move { last.await.remove(0) }
    }

    /// Waits for an event about an object, with that reason.
    #[track_caller]
    pub fn event(&self, reason: &str, about: &str) -> impl Future<Output = Value> {
        let what = format!("{}: event {reason} about {about}", Location::caller());
        let fields = format!("reason={reason},involvedObject.name={about}");
        let config = watcher::Config::default().fields(&fields);
        let some = |events: &[&Value]| !events.is_empty();
        let last = self.watch(what, self.api("", "v1", "Event"), config, some);
        async move { last.await.remove(0) }
    }

    /// The Pods of a CloneSet, in the order of their names.
    pub async fn pods_of(&self, set: &str) -> Vec<Value> {
        let selector = ListParams::default().labels(&format!("app={set}"));
        let list = self.pods().list(&selector).await.unwrap();
        list.items.into_iter().map(|pod| json!(pod)).collect()
    }

    /// Asks until there is an answer; for what no watch tells of.
    pub async fn until<T, F: Future<Output = Option<T>>>(&self, what: &str, ask: impl Fn() -> F) -> T {
        waits::until(what, &|| self.tail(), ask).await
    }

    /// Follows objects until they are, taken together, as wanted.
    async fn watch(
        &self,
        what: String,
        api: Api<DynamicObject>,
        config: watcher::Config,
        wanted: impl Fn(&[&Value]) -> bool,
    ) -> Vec<Value> {
        waits::follow(&what, &|| self.tail(), api, config, |one| json!(one), wanted).await
    }

    fn tail(&self) -> String {
        tails(self.logs.clone())
    }
}

/// The watch of a CloneSet's Pods.
fn selected(set: &str) -> watcher::Config {
    watcher::Config::default().labels(&format!("app={set}"))
}
