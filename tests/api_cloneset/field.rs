//! A namespace with CloneSets, and what tests do and see there.

use kruise::api::cloneset::CloneSet;
use kruise::cluster::Cluster;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::kubelet;
use crate::pods::{self, text};
use crate::settled::settled;
use crate::untyped::untyped;
use crate::waits::{self, tails};
use crate::world::{World, create, until};

/// A namespace of its own, whose Pods run.
pub struct Field {
    pub world: &'static World,
    pub admin: Cluster,
    pub namespace: String,
    kubelet: JoinHandle<()>,
}

impl Drop for Field {
    fn drop(&mut self) {
        self.kubelet.abort();
    }
}

impl Field {
    pub async fn new(world: &'static World, namespace: &str) -> Self {
        let admin = world.admin().await;
        for (kind, body) in [
            ("Namespace", json!({ "metadata": { "name": namespace } })),
            ("ServiceAccount", json!({ "metadata": { "name": "default" } })),
        ] {
            let of = (kind != "Namespace").then_some(namespace);
            let object = serde_json::from_value(body).unwrap();
            let api = untyped(&admin, "", "v1", kind, of);
            api.create(&PostParams::default(), &object).await.unwrap();
        }
        let pods = untyped(&admin, "", "v1", "Pod", Some(namespace));
        Self {
            world,
            kubelet: tokio::spawn(kubelet::play(pods)),
            admin,
            namespace: namespace.to_owned(),
        }
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

    /// Makes a CloneSet with one container `app`; `spec` is laid over its spec.
    pub async fn set(&self, name: &str, spec: Value) -> CloneSet {
        let mut whole = json!({
            "replicas": 3,
            "selector": { "matchLabels": { "app": name } },
            "template": {
                "metadata": { "labels": { "app": name } },
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{ "name": "app", "image": "example.com/app:1" }],
                },
            },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } },
        });
        json_patch::merge(&mut whole, &spec);
        create(
            &self.sets(),
            json!({ "metadata": { "name": name }, "spec": whole }),
        )
        .await
    }

    /// A merge patch of the CloneSet.
    pub async fn edit(&self, name: &str, patch: Value) -> CloneSet {
        let patch = Patch::Merge(patch);
        self.sets()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .unwrap()
    }

    /// Gives container `app` another image.
    pub async fn image(&self, name: &str, image: &str) -> CloneSet {
        let mut template = self.sets().get(name).await.unwrap().spec.template;
        template["spec"]["containers"][0]["image"] = json!(image);
        self.edit(name, json!({ "spec": { "template": template } })).await
    }

    /// Waits for a status that speaks of the newest spec.
    pub async fn status(
        &self,
        name: &str,
        what: &'static str,
        wanted: impl Fn(&CloneSet) -> bool,
    ) -> CloneSet {
        until(&self.sets(), name, what, |set: &CloneSet| {
            let seen = set.status.as_ref().and_then(|s| s.observed_generation);
            seen == set.metadata.generation && wanted(set)
        })
        .await
    }

    /// Waits until all Pods are updated and available.
    pub async fn settled(&self, name: &str) -> CloneSet {
        self.status(name, "all updated and available", settled).await
    }

    /// The Pods of a CloneSet, by name.
    pub async fn pods_of(&self, set: &str) -> Vec<Value> {
        let selector = kube::api::ListParams::default().labels(&format!("app={set}"));
        let list = self.pods().list(&selector).await.unwrap();
        list.items.into_iter().map(|pod| json!(pod)).collect()
    }

    /// Waits until the Pods of a CloneSet are as wanted.
    #[track_caller]
    pub fn until_pods(
        &self,
        set: &str,
        what: &'static str,
        wanted: impl Fn(&[&Value]) -> bool,
    ) -> impl Future<Output = Vec<Value>> {
        let caller = std::panic::Location::caller();
        let config = watcher::Config::default().labels(&format!("app={set}"));
        let pods = self.pods();
        async move {
            let (what, read) = (format!("{caller}: Pods of {set}: {what}"), |pod| json!(pod));
            waits::follow(&what, &|| self.tail(), pods, config, read, wanted).await
        }
    }

    /// Waits for an event about an object.
    pub async fn event(&self, reason: &str, about: &str) -> DynamicObject {
        let fields = format!("reason={reason},involvedObject.name={about}");
        let config = watcher::Config::default().fields(&fields);
        let (what, events) = (
            format!("event {reason} about {about}"),
            self.api("", "v1", "Event"),
        );
        let some = |events: &[&DynamicObject]| !events.is_empty();
        let mut found = waits::follow(&what, &|| self.tail(), events, config, |event| event, some).await;
        found.remove(0)
    }

    /// The end of the manager's log.
    fn tail(&self) -> String {
        tails([self.world.plane.dir().join("kruise-manager.log")])
    }

    /// Accepted writes of the manager in this namespace: verb, resource with subresource, name.
    pub fn writes(&self) -> Vec<(String, String, String)> {
        let all = self.world.plane.writes().unwrap();
        let ours = all.into_iter().filter(|w| {
            w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
                && w["objectRef"]["namespace"] == self.namespace.as_str()
                && w["responseStatus"]["code"].as_i64() < Some(300)
        });
        ours.map(|w| {
            let (object, sub) = (&w["objectRef"], text(&w["objectRef"]["subresource"]));
            let slash = if sub.is_empty() { "" } else { "/" };
            let resource = format!("{}{slash}{sub}", text(&object["resource"]));
            let body = w["responseObject"]["metadata"]["name"].as_str();
            let name = object["name"].as_str().or(body).unwrap_or_default().to_owned();
            (text(&w["verb"]), resource, name)
        })
        .collect()
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
