//! The CloneSets of a namespace and their Pods: helpers to change them and to wait.

use std::panic::Location;
use std::path::PathBuf;

use kruise_api::cloneset::CloneSet;
use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

use super::settled::is_settled;
use super::untyped::untyped;
use super::waits::{self, by_name, log_tails};

/// A namespace, with an administrator's client.
pub struct CloneSetNamespace {
    pub admin: Cluster,
    pub namespace: String,
    /// Log files of the programs that work there.
    logs: Vec<PathBuf>,
}

impl CloneSetNamespace {
    /// Creates the namespace.
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

    /// Creates a CloneSet of three Pods of that template, updated in place, at most this many at a time; `spec` is
    /// merged into its spec.
    pub async fn create_from_template(
        &self,
        name: &str,
        template: Value,
        max_unavailable: Value,
        spec: &Value,
    ) -> CloneSet {
        let mut merged_spec = json!({
            "replicas": 3,
            "selector": { "matchLabels": { "app": name } },
            "template": template,
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": max_unavailable } },
        });
        json_patch::merge(&mut merged_spec, spec);
        let object = json!({ "metadata": { "name": name }, "spec": merged_spec });
        let object: CloneSet = serde_json::from_value(object).unwrap();
        self.sets().create(&PostParams::default(), &object).await.unwrap()
    }

    /// Merges a patch into the CloneSet.
    pub async fn patch_set(&self, name: &str, patch: Value) -> CloneSet {
        let patch = Patch::Merge(patch);
        self.sets()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .unwrap()
    }

    /// Sets the image of container `app`, and merges `spec` into the CloneSet's spec in the same write.
    pub async fn set_image_and_spec(&self, name: &str, image: &str, spec: Value) -> CloneSet {
        let mut template = self.sets().get(name).await.unwrap().spec.template;
        template["spec"]["containers"][0]["image"] = json!(image);
        let mut merged_spec = json!({ "template": template });
        json_patch::merge(&mut merged_spec, &spec);
        self.patch_set(name, json!({ "spec": merged_spec })).await
    }

    /// Sets the image of container `app`.
    pub async fn set_image(&self, name: &str, image: &str) -> CloneSet {
        self.set_image_and_spec(name, image, json!({})).await
    }

    /// Waits for a status that has observed the newest spec.
    #[track_caller]
    pub fn wait_status(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&CloneSet) -> bool,
    ) -> impl Future<Output = CloneSet> {
        let what = format!("{}: {name}: {what}", Location::caller());
        let (sets, config) = (self.sets(), by_name(name));
        async move {
            let predicate = |found: &[&CloneSet]| {
                found.first().is_some_and(|set| {
                    let status = set.status.as_ref();
                    status.is_some_and(|s| s.observed_generation == set.metadata.generation) && predicate(set)
                })
            };
            let mut last =
                waits::watch_until(&what, &|| self.tail(), sets, config, |set| set, predicate).await;
            last.remove(0)
        }
    }

    /// Waits until all Pods are updated and available.
    #[track_caller]
    pub fn wait_settled(&self, name: &str) -> impl Future<Output = CloneSet> {
        self.wait_status(name, "all updated and available", is_settled)
    }

    /// Waits until `predicate` holds for the Pods of a CloneSet.
    #[track_caller]
    pub fn wait_pods(
        &self,
        set: &str,
        what: &str,
        predicate: impl Fn(&[&Value]) -> bool,
    ) -> impl Future<Output = Vec<Value>> {
        let what = format!("{}: Pods of {set}: {what}", Location::caller());
        self.watch_until(what, self.pods(), pods_of_set(set), predicate)
    }

    /// Waits until `predicate` holds for one of the Pods.
    #[track_caller]
    pub fn wait_pod(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&Value) -> bool,
    ) -> impl Future<Output = Value> {
        let what = format!("{}: Pod {name}: {what}", Location::caller());
        let predicate = move |pods: &[&Value]| pods.first().is_some_and(|pod| predicate(pod));
        let last = self.watch_until(what, self.pods(), by_name(name), predicate);
        async move { last.await.remove(0) }
    }

    /// Waits for an event about an object, with that reason.
    #[track_caller]
    pub fn wait_event(&self, reason: &str, about: &str) -> impl Future<Output = Value> {
        let what = format!("{}: event {reason} about {about}", Location::caller());
        let fields = format!("reason={reason},involvedObject.name={about}");
        let config = watcher::Config::default().fields(&fields);
        let any_event = |events: &[&Value]| !events.is_empty();
        let last = self.watch_until(what, self.api("", "v1", "Event"), config, any_event);
        async move { last.await.remove(0) }
    }

    /// The Pods of a CloneSet, in the order of their names.
    pub async fn pods_of(&self, set: &str) -> Vec<Value> {
        let selector = ListParams::default().labels(&format!("app={set}"));
        let list = self.pods().list(&selector).await.unwrap();
        list.items.into_iter().map(|pod| json!(pod)).collect()
    }

    /// Polls until there is a result, for what no watch shows.
    pub async fn poll_until<T, F: Future<Output = Option<T>>>(&self, what: &str, poll: impl Fn() -> F) -> T {
        waits::poll_until(what, &|| self.tail(), poll).await
    }

    /// Follows objects until `predicate` holds for all of them together.
    async fn watch_until(
        &self,
        what: String,
        api: Api<DynamicObject>,
        config: watcher::Config,
        predicate: impl Fn(&[&Value]) -> bool,
    ) -> Vec<Value> {
        waits::watch_until(&what, &|| self.tail(), api, config, |one| json!(one), predicate).await
    }

    /// The last lines of the logs of the programs.
    pub fn tail(&self) -> String {
        log_tails(self.logs.clone())
    }
}

/// Watch configuration for a CloneSet's Pods.
fn pods_of_set(set: &str) -> watcher::Config {
    watcher::Config::default().labels(&format!("app={set}"))
}
