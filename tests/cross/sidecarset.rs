//! SidecarSets of a running Go installation under our manager, and back: what is injected stays as it is, rollouts go
//! on, and each implementation updates what the other one injected.

use std::collections::BTreeMap;

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use kruise_api::keys::{
    SIDECAR_SET_HASH, SIDECAR_SET_IN_PLACE_UPDATE_STATE, SIDECAR_SET_INJECTED_LIST, SIDECAR_SET_NAME,
    SIDECAR_SET_WORKING_CONTAINER, SYSTEM_NAMESPACE,
};
use kruise_api::sidecarset::{SidecarSet, SidecarSetStatus};
use kruise_api::webhooks::{MUTATING, VALIDATING};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::cluster::{Image, NODE_NAME};

use crate::common_checks::{container_ids, has_condition};
use crate::interop_cluster::{InteropCluster, create};
use crate::manager::Manager;
use crate::takeover::restart_go_manager;
use crate::waits;

const IMAGE: &str = "kruise-test/term:1";
const EMPTY_IMAGE: &str = "kruise-test/slow-stop:1";
const TERM: &str = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";
/// Pods that the rollout by partition leaves for the other implementation.
const KEPT: i32 = 2;

/// A SidecarSet, the Pods that it was injected into, and its container that is updated.
struct Sidecars {
    set: &'static str,
    /// Label `app` of its Pods.
    app: &'static str,
    /// All sets of these Pods, as they list them.
    injected: &'static str,
    pods: Vec<String>,
}

impl Sidecars {
    fn new(set: &'static str) -> Self {
        let (app, injected) = match set {
            "also" | "cold" => ("cold", "also,cold"),
            other => (other, other),
        };
        let pods = Vec::new();
        Self {
            set,
            app,
            injected,
            pods,
        }
    }

    fn count(&self) -> i32 {
        i32::try_from(self.pods.len()).unwrap()
    }

    /// The containers of the set, the first one with this image.
    fn containers(&self, image: &str) -> Value {
        let mut side = json!({ "name": self.container(), "image": image, "imagePullPolicy": "IfNotPresent" });
        match self.set {
            "cold" => side["shareVolumePolicy"] = json!({ "type": "enabled" }),
            "hot" | "hot-late" => {
                side["upgradeStrategy"] =
                    json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": EMPTY_IMAGE });
            }
            _ => {}
        }
        json!([side])
    }

    fn container(&self) -> &'static str {
        if self.set == "also" { "second" } else { "side" }
    }

    fn is_hot(&self) -> bool {
        self.set.starts_with("hot")
    }

    fn manifest(&self) -> Value {
        let mut spec = json!({ "selector": { "matchLabels": { "app": self.app } }, "customVersion": "v1",
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": "default" } },
            "containers": self.containers(IMAGE), "updateStrategy": { "maxUnavailable": 1 } });
        let mut version = "v1beta1";
        match self.set {
            "cold" => {
                let setup = json!({ "name": "setup", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
                    "command": ["true"], "volumeMounts": [{ "name": "config", "mountPath": "/config" }] });
                spec["initContainers"] = json!([setup]);
                spec["volumes"] = json!([{ "name": "config", "emptyDir": {} }]);
            }
            "native" => {
                let mut native = self.containers(IMAGE);
                native[0]["restartPolicy"] = json!("Always");
                spec["initContainers"] = native;
                spec["containers"] = json!([]);
                spec["updateStrategy"] = json!({ "type": "NotUpdate" });
            }
            "older" => {
                version = "v1alpha1";
                spec["namespace"] = json!("default");
                let fields = spec.as_object_mut().unwrap();
                fields.retain(|field, _| field != "customVersion" && field != "namespaceSelector");
            }
            _ => {}
        }
        json!({ "apiVersion": format!("apps.kruise.io/{version}"), "kind": "SidecarSet",
            "metadata": { "name": self.set, "labels": { "team": "a" } }, "spec": spec })
    }

    async fn create(&self, cluster: &InteropCluster) {
        let manifest = self.manifest().to_string();
        let what = format!("{}: applied", self.set);
        // The webhooks of the set, and that of the conversion, respond after a moment.
        let apply = async || cluster.node.plane.apply(&manifest).ok();
        waits::poll_until(&what, &|| cluster.logs(), apply).await;
    }

    /// Creates a Pod as soon as it gets all of its sets, and waits until it is ready.
    async fn add_pod(&mut self, cluster: &InteropCluster, name: &str) {
        let pod = json!({ "metadata": { "name": name, "labels": { "app": self.app } }, "spec": {
            "nodeName": NODE_NAME, "terminationGracePeriodSeconds": 1,
            "volumes": [{ "name": "data", "emptyDir": {} }],
            "containers": [{ "name": "app", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
                "volumeMounts": [{ "name": "data", "mountPath": "/shared" }] }] } });
        let pods = cluster.api::<Pod>();
        let probe: Pod = serde_json::from_value(pod.clone()).unwrap();
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let injected = async || {
            let created = pods.create(&dry_run, &probe).await.ok()?;
            let list = created.annotations().get(SIDECAR_SET_INJECTED_LIST)?;
            (list == self.injected).then_some(())
        };
        let what = format!("{name}: a dry run is injected");
        waits::poll_until(&what, &|| cluster.logs(), injected).await;
        let created = create(&pods, pod).await;
        assert_eq!(created.annotations()[SIDECAR_SET_INJECTED_LIST], self.injected);
        let is_ready = |pod: &Pod| has_condition(pod, "Ready");
        cluster.wait_until(pods, name, "ready", is_ready).await;
        self.pods.push(name.to_owned());
    }

    /// Waits until the status of the newest spec is as wanted.
    async fn wait_status(
        &self,
        cluster: &InteropCluster,
        what: &str,
        predicate: impl Fn(&SidecarSetStatus) -> bool,
    ) -> SidecarSetStatus {
        let is_wanted = |set: &SidecarSet| {
            let status = set.status.as_ref();
            status.is_some_and(|s| s.observed_generation == set.metadata.generation && predicate(s))
        };
        let set = cluster.wait_until(sets(cluster), self.set, what, is_wanted).await;
        set.status.unwrap()
    }

    /// Waits until the status counts all Pods as updated and ready.
    async fn wait_updated(&self, cluster: &InteropCluster) -> SidecarSetStatus {
        let count = self.count();
        // OpenKruise does not follow the readiness of Pods if the strategy is NotUpdate.
        let readiness = self.set != "native";
        self.wait_status(cluster, "all updated", |s| {
            [s.matched_pods, s.updated_pods] == [count; 2]
                && (!readiness || [s.ready_pods, s.updated_ready_pods] == [count; 2])
        })
        .await
    }

    async fn patch(&self, cluster: &InteropCluster, spec: Value) {
        let patch = Patch::Merge(json!({ "spec": spec }));
        let patched = || async {
            let params = PatchParams::default();
            sets(cluster).patch(self.set, &params, &patch).await.ok()
        };
        let what = format!("{}: patched", self.set);
        waits::poll_until(&what, &|| cluster.logs(), patched).await;
    }

    async fn get_pods(&self, cluster: &InteropCluster) -> Vec<Pod> {
        let mut found = Vec::new();
        for name in &self.pods {
            found.push(cluster.api::<Pod>().get(name).await.unwrap());
        }
        found
    }

    /// Revisions of this set.
    async fn revisions(&self, cluster: &InteropCluster) -> Vec<String> {
        let found = revisions(cluster).await;
        let prefix = format!("{}-", self.set);
        let of_set = |(name, data): (String, Value)| {
            let label = data["metadata"]["labels"][SIDECAR_SET_NAME].clone();
            (label == self.set && name.starts_with(&prefix)).then_some(name)
        };
        found.into_iter().filter_map(of_set).collect()
    }
}

fn sets(cluster: &InteropCluster) -> Api<SidecarSet> {
    Api::all(cluster.client.clone())
}

fn annotation(pod: &Pod, key: &str) -> Value {
    let text = pod.annotations().get(key);
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// Image of a container in the spec.
fn image<'a>(pod: &'a Pod, container: &str) -> &'a str {
    let containers = &pod.spec.as_ref().unwrap().containers;
    let found = containers.iter().find(|c| c.name == container).unwrap();
    found.image.as_deref().unwrap()
}

/// The container that the update of a set changes: with hot upgrade, the one that works.
fn working(pod: &Pod, sidecars: &Sidecars) -> String {
    let container = sidecars.container();
    if !sidecars.is_hot() {
        return container.to_owned();
    }
    let working = annotation(pod, SIDECAR_SET_WORKING_CONTAINER)[container].clone();
    working.as_str().unwrap().to_owned()
}

/// Revisions of all SidecarSets, by name, without who manages their fields.
async fn revisions(cluster: &InteropCluster) -> BTreeMap<String, Value> {
    let api: Api<ControllerRevision> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    by_name(api, &ListParams::default().labels(SIDECAR_SET_NAME)).await
}

async fn by_name<K>(api: Api<K>, params: &ListParams) -> BTreeMap<String, Value>
where
    K: Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug,
{
    let found = api.list(params).await.unwrap().items.into_iter();
    found
        .map(|mut object| {
            object.meta_mut().managed_fields = None;
            (object.name_any(), json!(object))
        })
        .collect()
}

/// What a takeover may not change.
struct Snapshot {
    revisions: BTreeMap<String, Value>,
    pods: BTreeMap<String, Value>,
    sets: BTreeMap<String, Value>,
    /// Number of writes to the API server until then.
    writes: usize,
}

impl Snapshot {
    /// All sets and revisions, and the Pods whose update is not in progress.
    async fn take(cluster: &InteropCluster) -> Self {
        let mut pods = by_name(cluster.api::<Pod>(), &ListParams::default()).await;
        pods.retain(|_, pod| !is_late(&pod["metadata"]["labels"]["app"]));
        for pod in pods.values_mut() {
            // kubelet also writes a status that is not different.
            pod["metadata"]["resourceVersion"].take();
        }
        let mut sets = by_name(sets(cluster), &ListParams::default()).await;
        for set in sets.values_mut() {
            set["metadata"]["resourceVersion"].take();
            let late = is_late(&set["metadata"]["name"]);
            // Theirs does not follow the readiness of Pods of such a set.
            let native = set["metadata"]["name"] == "native";
            let status = set["status"].as_object_mut().unwrap();
            let counts = ["readyPods", "updatedReadyPods"];
            let ours = ["conditions", "notInjectedPods"];
            status.retain(|field, _| {
                let field = field.as_str();
                !(late || ours.contains(&field) || native && counts.contains(&field))
            });
        }
        let revisions = revisions(cluster).await;
        Self {
            revisions,
            pods,
            sets,
            writes: cluster.node.plane.audited_writes().unwrap().len(),
        }
    }

    /// Asserts that nothing has changed since, except for one new Pod of each set that is not late.
    async fn assert_kept(mut self, cluster: &InteropCluster, side: &str) {
        let after = Self::take(cluster).await;
        let added = ["matchedPods", "updatedPods", "readyPods", "updatedReadyPods"];
        for set in self.sets.values_mut() {
            for field in added {
                if let Some(count) = set["status"].get_mut(field) {
                    *count = json!(count.as_i64().unwrap() + 1);
                }
            }
        }
        for (before, after) in [(&self.revisions, &after.revisions), (&self.sets, &after.sets)] {
            let names = |of: &BTreeMap<String, Value>| of.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(before), names(after), "{side}\n{}", cluster.logs());
        }
        let (revisions, sets) = (self.revisions.iter(), self.sets.iter());
        for (name, before) in revisions {
            assert_eq!(*before, after.revisions[name], "{side}: revision {name}");
        }
        for (name, before) in sets {
            assert_eq!(*before, after.sets[name], "{side}: SidecarSet {name}");
        }
        for (name, before) in &self.pods {
            assert_eq!(*before, after.pods[name], "{side}: Pod {name}");
        }
        let writes = cluster.node.plane.audited_writes().unwrap();
        let to_old_pods = writes[self.writes..].iter().filter(|write| {
            let name = write["objectRef"]["name"].as_str();
            let user = write["user"]["username"].as_str().unwrap_or_default();
            write["objectRef"]["resource"] == "pods"
                && user.starts_with("system:serviceaccount:")
                && name.is_some_and(|name| self.pods.contains_key(name))
        });
        assert_eq!(to_old_pods.collect::<Vec<_>>(), Vec::<&Value>::new(), "{side}");
    }
}

/// Whether the update of such Pods is in progress during a takeover.
fn is_late(app: &Value) -> bool {
    app == "late" || app == "hot-late"
}

/// Whether `after` is the Pod `before` in which the update of the set has replaced its container, and no other one.
fn assert_updated(
    sidecars: &Sidecars,
    (before, after): (&Pod, &Pod),
    image_now: &str,
    status: &SidecarSetStatus,
) {
    let name = after.name_any();
    assert_eq!(before.uid(), after.uid(), "{name}");
    let worked = working(before, sidecars);
    let works = working(after, sidecars);
    assert_eq!(image(after, &works), image_now, "{name}");
    let (ids_before, ids) = (container_ids(before), container_ids(after));
    for (container, (id, restarts)) in &ids {
        let before = &ids_before[container];
        let restarted = [&worked, &works].contains(&container);
        let expected = before.1 + i32::from(restarted);
        assert_eq!(*restarts, expected, "{name}: restarts of {container}");
        assert_eq!(before.0 != *id, restarted, "{name}: {container}");
    }
    if sidecars.is_hot() {
        assert_ne!(worked, works, "{name}");
        assert_eq!(image(after, &worked), EMPTY_IMAGE, "{name}");
    }
    let records = annotation(after, SIDECAR_SET_HASH);
    let record = &records[sidecars.set];
    assert_eq!(
        record["controllerRevision"],
        json!(status.latest_revision),
        "{name}"
    );
    assert_eq!(record["sidecarList"], json!([sidecars.container()]), "{name}");
    let state = annotation(after, SIDECAR_SET_IN_PLACE_UPDATE_STATE);
    assert!(
        state[sidecars.set]["updateTimestamp"].is_string(),
        "{name}: {state}"
    );
    // The other sets of the Pod keep their records.
    let others = |pod: &Pod| {
        let mut records = annotation(pod, SIDECAR_SET_HASH);
        records[sidecars.set].take();
        records
    };
    assert_eq!(others(before), others(after), "{name}");
}

/// Waits until all Pods of a set are updated to this image, and checks them.
async fn assert_all_updated(cluster: &InteropCluster, sidecars: &Sidecars, before: &[Pod], image_now: &str) {
    for pod in before {
        let works = |pod: &Pod| {
            let (works, hot) = (working(pod, sidecars), sidecars.is_hot());
            let idle_images = container_ids(pod)
                .into_keys()
                .filter(|name| hot && name.starts_with("side") && *name != works)
                .map(|name| image(pod, &name) == EMPTY_IMAGE);
            image(pod, &works) == image_now && idle_images.into_iter().all(|empty| empty)
        };
        let pods = cluster.api::<Pod>();
        cluster.wait_until(pods, &pod.name_any(), "updated", works).await;
    }
    let status = sidecars.wait_updated(cluster).await;
    let set = sets(cluster).get(sidecars.set).await.unwrap();
    let after = sidecars.get_pods(cluster).await;
    for (before, after) in before.iter().zip(&after) {
        let hash = &annotation(after, SIDECAR_SET_HASH)[sidecars.set]["hash"];
        assert_eq!(*hash, set.annotations()[SIDECAR_SET_HASH], "{}", after.name_any());
        assert_updated(sidecars, (before, after), image_now, &status);
    }
}

/// The sets of the test, with their Pods.
struct Test<'a> {
    cluster: &'a InteropCluster,
    /// Nothing of these is in progress when the programs are replaced.
    settled: Vec<Sidecars>,
    /// A rollout that its partition has stopped.
    partition: Sidecars,
    /// Rollouts whose image does not exist yet.
    late: Vec<Sidecars>,
}

/// Rollouts that one implementation has started.
struct Rollouts {
    partition: Started,
    late: Vec<Started>,
}

/// One rollout: its image, its Pods before, and its revisions.
struct Started {
    image: String,
    before: Vec<Pod>,
    revisions: Vec<String>,
    latest: Option<String>,
}

impl<'a> Test<'a> {
    /// Creates the sets and their Pods under the implementation that runs.
    async fn create(cluster: &'a InteropCluster) -> Self {
        let mut test = Self {
            cluster,
            settled: ["also", "cold", "hot", "native", "older"]
                .map(Sidecars::new)
                .into(),
            partition: Sidecars::new("part"),
            late: ["hot-late", "late"].map(Sidecars::new).into(),
        };
        for sidecars in test.all() {
            sidecars.create(cluster).await;
        }
        test.add_pods("first").await;
        for name in ["part-2", "part-3"] {
            test.partition.add_pod(cluster, name).await;
        }
        for (late, names) in test
            .late
            .iter_mut()
            .zip([vec!["hot-late-1"], vec!["late-1", "late-2"]])
        {
            for name in names {
                late.add_pod(cluster, name).await;
            }
        }
        for sidecars in test.all() {
            sidecars.wait_updated(cluster).await;
        }
        test
    }

    fn all(&self) -> impl Iterator<Item = &Sidecars> {
        let settled = self.settled.iter();
        settled.chain([&self.partition]).chain(&self.late)
    }

    /// Adds a Pod to each set that is not late.
    async fn add_pods(&mut self, suffix: &str) {
        for sidecars in self.settled.iter_mut().chain([&mut self.partition]) {
            let name = format!("{}-{suffix}", sidecars.app);
            if sidecars.set == "also" {
                // They are those of `cold`.
                sidecars.pods.push(name);
                continue;
            }
            sidecars.add_pod(self.cluster, &name).await;
        }
    }

    /// Starts the rollout of an image; the caller waits for what it comes to.
    async fn start(&self, sidecars: &Sidecars, image: &str, strategy: Value) -> Started {
        let before = sidecars.get_pods(self.cluster).await;
        let spec = json!({ "containers": sidecars.containers(image), "updateStrategy": strategy });
        sidecars.patch(self.cluster, spec).await;
        let image = image.to_owned();
        Started {
            image,
            before,
            revisions: Vec::new(),
            latest: None,
        }
    }

    /// Starts rollouts, and waits until they are in the middle.
    async fn start_rollouts(&self, side: &str, image: &str) -> Rollouts {
        let cluster = self.cluster;
        let mut started = self
            .start(&self.partition, image, json!({ "partition": KEPT }))
            .await;
        let updated = self.partition.count() - KEPT;
        let at_partition = |s: &SidecarSetStatus| {
            [s.updated_pods, s.updated_ready_pods] == [updated; 2] && s.ready_pods == self.partition.count()
        };
        let status = self
            .partition
            .wait_status(cluster, "at its partition", at_partition);
        started.latest = status.await.latest_revision.into();
        started.revisions = self.partition.revisions(cluster).await;
        let mut late = Vec::new();
        for sidecars in &self.late {
            let image = format!("cross/{}-{side}:1", sidecars.set);
            let mut started = self.start(sidecars, &image, json!({})).await;
            let ready = sidecars.count() - 1;
            let in_the_middle = |s: &SidecarSetStatus| [s.updated_pods, s.ready_pods] == [1, ready];
            let status = sidecars
                .wait_status(cluster, "one in mid-update", in_the_middle)
                .await;
            started.latest = status.latest_revision.into();
            started.revisions = sidecars.revisions(cluster).await;
            late.push(started);
        }
        let partition = started;
        Rollouts { partition, late }
    }

    /// Pushes the images that do not exist. kubelet retries after 10, 20, 40 seconds and so on.
    fn push_images(&self, rollouts: &Rollouts) {
        for Started { image, .. } in &rollouts.late {
            let term = Image::busybox().script(TERM);
            self.cluster.node.runtime.registry.push(image, &term).unwrap();
        }
    }

    /// Waits for the end of all rollouts, which keep their revisions.
    async fn finish_rollouts(&self, rollouts: &Rollouts) {
        let partition = json!({ "updateStrategy": { "partition": 0 } });
        self.partition.patch(self.cluster, partition).await;
        let started = [&rollouts.partition].into_iter().chain(&rollouts.late);
        let sets = [&self.partition].into_iter().chain(&self.late);
        for (started, sidecars) in started.zip(sets) {
            let before = &started.before;
            assert_all_updated(self.cluster, sidecars, before, &started.image).await;
            let status = sidecars.wait_updated(self.cluster).await;
            assert_eq!(Some(status.latest_revision), started.latest, "{}", sidecars.set);
            let revisions = sidecars.revisions(self.cluster).await;
            assert_eq!(revisions, started.revisions, "{}", sidecars.set);
        }
    }

    /// Updates Pods that either implementation has injected.
    async fn update_in_place(&self, image: &str) {
        let sets = self.settled.iter().filter(|s| s.set != "native");
        for sidecars in sets {
            // The status counts a Pod before kubelet has replaced what was switched off.
            let started = self.start(sidecars, image, json!({})).await;
            assert_all_updated(self.cluster, sidecars, &started.before, image).await;
        }
    }

    /// What the other implementation does first: it keeps everything, and injects and counts new Pods.
    async fn check_takeover(&mut self, before: Snapshot, side: &str) {
        self.add_pods(side).await;
        for sidecars in &self.settled {
            sidecars.wait_updated(self.cluster).await;
        }
        let (count, kept) = (self.partition.count(), KEPT);
        let new_counted =
            |s: &SidecarSetStatus| s.matched_pods == count && s.updated_ready_pods == count - kept;
        self.partition
            .wait_status(self.cluster, "the new Pod counted", new_counted)
            .await;
        before.assert_kept(self.cluster, side).await;
    }
}

/// Replaces the Go manager with this process ID by ours, in the steps of `deploy/README.md`.
async fn replace_go_manager(cluster: &InteropCluster, manager: u32) -> Manager {
    cluster.kill(manager);
    let kubectl = |kind: &str, name: &str| cluster.node.plane.kubectl(&["delete", kind, name]).unwrap();
    kubectl(&MutatingWebhookConfiguration::kind(&()), MUTATING);
    kubectl(&ValidatingWebhookConfiguration::kind(&()), VALIDATING);
    cluster.deploy("apply", "default");
    let manager = cluster.start_manager();
    manager.wait_for_readyz_text("leading");
    manager
}

#[tokio::test]
async fn sidecar_sets_survive_takeover_and_return() {
    let cluster = InteropCluster::start().await;
    cluster.peer().install().unwrap();
    let go_manager = cluster.peer().start_manager().unwrap();
    let mut test = Test::create(&cluster).await;
    let rollouts = test.start_rollouts("theirs", "kruise-test/term:2").await;
    let before = Snapshot::take(&cluster).await;

    let mut manager = replace_go_manager(&cluster, go_manager).await;
    test.push_images(&rollouts);
    test.check_takeover(before, "ours").await;
    test.finish_rollouts(&rollouts).await;
    test.update_in_place("kruise-test/term:2").await;
    let rollouts = test.start_rollouts("ours", "kruise-test/term:1").await;
    let before = Snapshot::take(&cluster).await;
    manager.stop().unwrap();

    restart_go_manager(&cluster).await;
    test.push_images(&rollouts);
    test.check_takeover(before, "back").await;
    test.finish_rollouts(&rollouts).await;
    test.update_in_place("kruise-test/term:1").await;
    cluster.assert_nothing_forbidden();
}
