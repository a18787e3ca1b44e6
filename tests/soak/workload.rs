//! The work during faults: image jobs, container recreates, rollouts and sidecar updates, each started once and followed
//! to its end.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::time::{Duration, Instant};

use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::{Image, ImagePusher};

use super::chaos::RECOVERY_TIMEOUT;
use super::container_runs::ContainerRuns;
use super::pods::{container_status, name, runs_image, text, uids_by_name};
use super::soak_cluster::SoakCluster;
use support::connect::connect;
use support::untyped::untyped;

const NAMESPACE: &str = "soak";
/// Pods of the CloneSet that is rolled out.
const PODS: usize = 3;
/// Name of the SidecarSet, and of its container.
const SIDECAR: &str = "side";
/// Jobs, and Pods with their requests, that are kept.
const RETAINED: usize = 20;
/// Average number of events for one item of work; programs that were killed write some once more.
const MAX_EVENTS_PER_ITEM: usize = 3;
/// Old revisions that a CloneSet keeps.
const REVISION_HISTORY_LIMIT: usize = 10;

/// Where all objects are created.
pub struct Workload {
    admin: Cluster,
    images: ImagePusher,
    runs: ContainerRuns,
    /// Name and UID of the CloneSet's Pods.
    pods: BTreeMap<String, String>,
}

/// Number of items that were completed.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompletedWork {
    pub jobs: usize,
    pub requests: usize,
    pub rollouts: usize,
    pub sidecar_updates: usize,
}

/// An image that writes a line at its start, and one at TERM; its name is unique.
fn recording_image(name: &str) -> Image {
    Image::busybox().script(&format!(
        "says() {{ echo $1 $(date -u +%T) >> /runs/$HOSTNAME.$NAME; }}; trap 'trap \"\" TERM; says stopped; exit 0' TERM; \
         says started; while :; do sleep 3600 & wait $!; done; : {name}"
    ))
}

/// A Pod that writes to this folder.
fn pod_spec(runs: &ContainerRuns, image: &str, containers: &[&str]) -> Value {
    let containers: Vec<Value> = containers
        .iter()
        .map(|name| {
            json!({ "name": name, "image": image, "imagePullPolicy": "IfNotPresent",
                "env": [{ "name": "NAME", "value": name }],
                "volumeMounts": [{ "name": "runs", "mountPath": "/runs" }] })
        })
        .collect();
    json!({
        "terminationGracePeriodSeconds": 10,
        "volumes": [{ "name": "runs", "hostPath": { "path": runs.folder(), "type": "Directory" } }],
        "containers": containers,
    })
}

/// A set whose sidecar writes to the same folder.
fn sidecar_set(runs: &ContainerRuns) -> Value {
    let spec = pod_spec(runs, "soak/side:0", &[SIDECAR]);
    let mut container = spec["containers"][0].clone();
    container["podInjectPolicy"] = json!("AfterAppContainer");
    container["volumeMounts"][0]["name"] = json!("sidecar-runs");
    let mut volume = spec["volumes"][0].clone();
    volume["name"] = json!("sidecar-runs");
    kruise_object(
        "SidecarSet",
        SIDECAR,
        json!({
        "selector": { "matchLabels": { "app": "web" } },
        "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": NAMESPACE } },
        "containers": [container], "volumes": [volume],
        "updateStrategy": { "type": "RollingUpdate", "maxUnavailable": 1 } }),
    )
}

/// Adds barriers to the containers, which our manager lifts one after the other.
fn add_launch_barriers(pod: &str, spec: &mut Value) {
    let containers = spec["containers"].as_array_mut().into_iter().flatten();
    for (place, container) in (1..).zip(containers) {
        let key = json!({ "name": format!("{pod}-barrier"), "key": format!("p_{}", 10 - place) });
        let barrier = json!({ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": { "configMapKeyRef": key } });
        container["env"].as_array_mut().unwrap().push(barrier);
    }
}

/// Names of all objects of an API.
async fn list_names(api: &Api<DynamicObject>) -> Result<Vec<String>, String> {
    let list = api.list(&ListParams::default()).await;
    let objects = list.map_err(|why| why.to_string())?.items;
    Ok(objects.iter().map(|object| name(&json!(object))).collect())
}

/// Message of a request's failure, if it failed.
fn failure_reason(request: &Value) -> &str {
    let conditions = request["status"]["conditions"].as_array();
    let failed = conditions.into_iter().flatten().find(|c| c["type"] == "Failed");
    failed.and_then(|c| c["reason"].as_str()).unwrap_or_default()
}

/// An object of one of our kinds.
fn kruise_object(kind: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

/// Retries until it succeeds, since a fault may make the server unreachable.
async fn retry_until_ok<T, E: Display, F: Future<Output = Result<T, E>>>(
    what: &str,
    attempt: impl Fn() -> F,
) -> T {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(why) => assert!(
                start.elapsed() < RECOVERY_TIMEOUT,
                "{what}: still impossible after {RECOVERY_TIMEOUT:?}: {why}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

impl Workload {
    /// Creates the objects that exist during the whole run.
    pub async fn start(cluster: &SoakCluster) -> Self {
        let admin = connect(cluster.node.plane.kubeconfig()).await;
        let workload = Self {
            admin,
            images: cluster.node.runtime.registry.pusher().clone(),
            runs: ContainerRuns::new(cluster),
            pods: BTreeMap::new(),
        };
        let namespaces = untyped(&workload.admin, "", "v1", "Namespace", None);
        workload
            .create(&namespaces, json!({ "metadata": { "name": NAMESPACE } }))
            .await;
        let accounts = workload.api("", "v1", "ServiceAccount");
        retry_until_ok("the default service account", || accounts.get("default")).await;
        let secret = json!({ "metadata": { "name": "login" }, "type": "kubernetes.io/dockerconfigjson",
            "stringData": { ".dockerconfigjson": cluster.node.runtime.registry.docker_config() } });
        workload.create(&workload.api("", "v1", "Secret"), secret).await;
        for name in ["soak/web:0", "soak/once:1", "soak/side:0"] {
            workload.push_image(name).await;
        }
        workload
            .create(&workload.sidecar_sets(), sidecar_set(&workload.runs))
            .await;
        workload.wait_injected().await;
        let web = kruise_object(
            "CloneSet",
            "web",
            json!({
            "replicas": PODS,
            "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": { "labels": { "app": "web" } }, "spec": pod_spec(&workload.runs, "soak/web:0", &["app"]) },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": 1 } } }),
        );
        workload.create(&workload.sets(), web).await;
        let pods = workload.wait_rolled_out("soak/web:0").await;
        Self {
            pods: uids_by_name(&pods),
            ..workload
        }
    }

    fn api(&self, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
        untyped(&self.admin, group, version, kind, Some(NAMESPACE))
    }

    fn jobs(&self) -> Api<DynamicObject> {
        self.api("apps.kruise.io", "v1beta1", "ImagePullJob")
    }

    fn requests(&self) -> Api<DynamicObject> {
        self.api("apps.kruise.io", "v1beta1", "ContainerRecreateRequest")
    }

    fn sets(&self) -> Api<DynamicObject> {
        self.api("apps.kruise.io", "v1beta1", "CloneSet")
    }

    fn sidecar_sets(&self) -> Api<DynamicObject> {
        untyped(&self.admin, "apps.kruise.io", "v1beta1", "SidecarSet", None)
    }

    /// Waits until new Pods of the CloneSet get the sidecar.
    async fn wait_injected(&self) {
        let mut pod = json!({ "metadata": { "name": "probe", "labels": { "app": "web" } } });
        pod["spec"] = pod_spec(&self.runs, "soak/web:0", &["app"]);
        let pod: DynamicObject = serde_json::from_value(pod).unwrap();
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let pods = self.api("", "v1", "Pod");
        retry_until_ok("the sidecar in a new Pod", || async {
            let pod = pods.create(&params, &pod).await.map_err(|why| why.to_string())?;
            let containers = pod.data["spec"]["containers"].as_array();
            let injected = containers.is_some_and(|all| all.iter().any(|one| one["name"] == SIDECAR));
            injected.then_some(()).ok_or_else(|| json!(pod).to_string())
        })
        .await;
    }

    /// Creates an object; an existing one is from an earlier attempt.
    async fn create(&self, api: &Api<DynamicObject>, object: Value) {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        retry_until_ok("an object to be created", || async {
            match api.create(&PostParams::default(), &object).await {
                Ok(_) => Ok(()),
                Err(kube::Error::Api(why)) if why.code == 409 => Ok(()),
                Err(kube::Error::Api(why)) if [400, 422].contains(&why.code) => panic!("{object:?}: {why}"),
                Err(why) => Err(why),
            }
        })
        .await;
    }

    /// Waits until `predicate` holds for the object.
    async fn wait_until(
        &self,
        api: &Api<DynamicObject>,
        name: &str,
        what: &str,
        predicate: impl Fn(&Value) -> bool,
    ) -> Value {
        retry_until_ok(&format!("{name}: {what}"), || async {
            let object = api.get(name).await.map_err(|why| why.to_string())?;
            let object = json!(object);
            if predicate(&object) {
                Ok(object)
            } else {
                Err(object.to_string())
            }
        })
        .await
    }

    /// Starts work of each kind until the deadline, and follows it to its end.
    pub async fn run_until(&self, deadline: Instant) -> CompletedWork {
        let (jobs, requests, rollouts, sidecar_updates) = tokio::join!(
            self.run_pull_jobs(deadline),
            self.run_recreates(deadline),
            self.run_rollouts(deadline),
            self.run_sidecar_updates(deadline)
        );
        CompletedWork {
            jobs,
            requests,
            rollouts,
            sidecar_updates,
        }
    }

    /// A job for a new tag every few seconds, each fourth with a pull secret; all must succeed.
    async fn run_pull_jobs(&self, deadline: Instant) -> usize {
        let mut started = 0;
        while Instant::now() < deadline {
            started += 1;
            let image = format!("soak/ahead-{}:{started}", started % 8);
            let (images, new_tag) = (self.images.clone(), image.clone());
            let tagged = tokio::task::spawn_blocking(move || images.tag("soak/once:1", &new_tag)).await;
            tagged.unwrap().unwrap();
            let secrets = if started % 4 == 0 { vec!["login"] } else { vec![] };
            let job = kruise_object(
                "ImagePullJob",
                &format!("job-{started}"),
                json!({
                "image": image, "pullSecrets": secrets,
                "pullPolicy": { "timeoutSeconds": 60 },
                "completionPolicy": { "type": "Always" } }),
            );
            self.create(&self.jobs(), job).await;
            if started > RETAINED {
                self.finish_job(started - RETAINED).await;
            }
            tokio::time::sleep(Duration::from_secs(4)).await;
        }
        for number in (started + 1).saturating_sub(RETAINED).max(1)..=started {
            self.finish_job(number).await;
        }
        started
    }

    /// Waits for the end of a job, which must have succeeded, and deletes it.
    async fn finish_job(&self, number: usize) {
        let name = format!("job-{number}");
        let is_complete = |job: &Value| job["status"]["completionTime"].is_string();
        let job = self
            .wait_until(&self.jobs(), &name, "to be complete", is_complete)
            .await;
        let status = &job["status"];
        let is = |field: &str| status[field] == 1;
        // Disks are full for longer than all attempts of a job take.
        let failure_message = &status["conditions"][0]["message"];
        let disk_was_full = failure_message
            .as_str()
            .is_some_and(|why| why.contains("the node's disk is full"));
        assert!(
            is("desired") && (is("succeeded") || is("failed") && disk_was_full),
            "{job}"
        );
        self.delete(&self.jobs(), &name).await;
    }

    /// Deletes an object; a missing one was deleted by an earlier attempt.
    async fn delete(&self, api: &Api<DynamicObject>, name: &str) {
        retry_until_ok("an object to be deleted", || async {
            match api.delete(name, &Default::default()).await {
                Err(kube::Error::Api(why)) if why.code == 404 => Ok(()),
                deleted => deleted.map(drop),
            }
        })
        .await;
    }

    /// One Pod after the other, both containers of which are recreated once. Those of each third Pod start in order.
    async fn run_recreates(&self, deadline: Instant) -> usize {
        let (pods, mut started) = (self.api("", "v1", "Pod"), 0);
        while Instant::now() < deadline {
            started += 1;
            let pod = format!("pod-{started}");
            let mut spec = pod_spec(&self.runs, "soak/once:1", &["a", "b"]);
            if started % 3 == 0 {
                add_launch_barriers(&pod, &mut spec);
            }
            self.create(&pods, json!({ "metadata": { "name": pod }, "spec": spec }))
                .await;
            let is_ready = |pod: &Value| container_status(pod, "a").ready && container_status(pod, "b").ready;
            let before = self.wait_until(&pods, &pod, "to be ready", is_ready).await;
            let mut request = self
                .run_recreate_request(&pod, &format!("again-{started}"), started % 2 == 0)
                .await;
            // The manager fails a request that no daemon has accepted for a minute, as in an outage.
            for more in 1.. {
                if failure_reason(&request) != "NoDaemon" {
                    break;
                }
                let now = retry_until_ok("a Pod", || pods.get(&pod)).await;
                for name in ["a", "b"] {
                    assert_eq!(
                        container_status(&json!(now), name).id,
                        container_status(&before, name).id,
                        "{request}"
                    );
                }
                request = self
                    .run_recreate_request(&pod, &format!("again-{started}-{more}"), started % 2 == 0)
                    .await;
            }
            let states = request["status"]["containerRecreateStates"].as_array();
            assert!(
                states.is_some_and(|all| all.len() == 2 && all.iter().all(|s| s["phase"] == "Succeeded")),
                "{request}"
            );
            let is_recreated = |now: &Value| {
                ["a", "b"].iter().all(|c| {
                    container_status(now, c).ready
                        && container_status(now, c).id != container_status(&before, c).id
                })
            };
            self.wait_until(&pods, &pod, "to be ready again", is_recreated)
                .await;
            // A node has room for only so many. Anything done twice would have been done by now.
            if started > RETAINED {
                self.finish_recreate(started - RETAINED).await;
            }
        }
        for number in (started + 1).saturating_sub(RETAINED).max(1)..=started {
            self.finish_recreate(number).await;
        }
        started
    }

    /// Checks that each container of a Pod was stopped once, and deletes the Pod and its requests.
    async fn finish_recreate(&self, number: usize) {
        let pod = format!("pod-{number}");
        for container in ["a", "b"] {
            self.runs.assert_stop_count(&pod, container, 1);
        }
        self.delete(&self.api("", "v1", "Pod"), &pod).await;
        let requests = self.requests();
        let all = retry_until_ok("the requests", || list_names(&requests)).await;
        let (first, more) = (format!("again-{number}"), format!("again-{number}-"));
        for request in all
            .iter()
            .filter(|name| **name == first || name.starts_with(&more))
        {
            self.delete(&requests, request).await;
        }
    }

    /// Requests the recreation of both containers of the Pod, and waits for its end.
    async fn run_recreate_request(&self, pod: &str, name: &str, ordered: bool) -> Value {
        let request = kruise_object(
            "ContainerRecreateRequest",
            name,
            json!({ "podName": pod,
            "containers": [{ "name": "a" }, { "name": "b" }],
            "strategy": { "orderedRecreate": ordered } }),
        );
        self.create(&self.requests(), request).await;
        let is_complete = |request: &Value| request["status"]["completionTime"].is_string();
        self.wait_until(&self.requests(), name, "to be complete", is_complete)
            .await
    }

    /// One rollout after the other, in place.
    async fn run_rollouts(&self, deadline: Instant) -> usize {
        let mut started = 0;
        while Instant::now() < deadline {
            started += 1;
            let image = format!("soak/web:{started}");
            self.push_image(&image).await;
            let patch = json!([{ "op": "replace", "path": "/spec/template/spec/containers/0/image", "value": image }]);
            let patch = Patch::Json::<()>(serde_json::from_value(patch).unwrap());
            let (sets, params) = (self.sets(), PatchParams::default());
            retry_until_ok("a new image", || sets.patch("web", &params, &patch)).await;
            let pods = self.wait_rolled_out(&image).await;
            assert_eq!(uids_by_name(&pods), self.pods, "Pods were replaced");
        }
        started
    }

    /// One image of the sidecar after the other, in the Pods that are rolled out meanwhile.
    async fn run_sidecar_updates(&self, deadline: Instant) -> usize {
        let mut started = 0;
        while Instant::now() < deadline {
            started += 1;
            let image = format!("soak/side:{started}");
            self.push_image(&image).await;
            let patch = json!([{ "op": "replace", "path": "/spec/containers/0/image", "value": image }]);
            let patch = Patch::Json::<()>(serde_json::from_value(patch).unwrap());
            let (sets, params) = (self.sidecar_sets(), PatchParams::default());
            retry_until_ok("a new sidecar", || sets.patch(SIDECAR, &params, &patch)).await;
            self.wait_until(&sets, SIDECAR, &format!("to run {image}"), |set| {
                let status = &set["status"];
                let counts = ["updatedReadyPods", "readyPods", "matchedPods"];
                status["observedGeneration"] == set["metadata"]["generation"]
                    && counts.iter().all(|c| status[c] == PODS)
            })
            .await;
        }
        started
    }

    /// Waits until the CloneSet runs the image on all Pods, and its status says so.
    async fn wait_rolled_out(&self, image: &str) -> Vec<Value> {
        self.wait_until(&self.sets(), "web", &format!("to run {image}"), |set| {
            let status = &set["status"];
            let counts = ["updatedReadyReplicas", "readyReplicas", "replicas"];
            status["observedGeneration"] == set["metadata"]["generation"]
                && counts.iter().all(|c| status[c] == PODS)
        })
        .await;
        let (api, selector) = (self.api("", "v1", "Pod"), ListParams::default().labels("app=web"));
        let list = retry_until_ok("the CloneSet's Pods", || api.list(&selector)).await;
        let pods: Vec<Value> = list.items.into_iter().map(|pod| json!(pod)).collect();
        assert!(
            pods.len() == PODS && pods.iter().all(|pod| runs_image(pod, image)),
            "{image}: {pods:#?}"
        );
        pods
    }

    /// Asserts that nothing was done twice, and nothing is left over.
    pub async fn assert_consistent(&self, completed: &CompletedWork) {
        for pod in self.pods.keys() {
            self.runs.assert_stop_count(pod, "app", completed.rollouts);
            self.runs
                .assert_stop_count(pod, SIDECAR, completed.sidecar_updates);
        }
        let revisions = self.api("apps", "v1", "ControllerRevision");
        let all = retry_until_ok("the revisions", || list_names(&revisions)).await;
        assert!(
            all.len() <= REVISION_HISTORY_LIMIT + 2,
            "{all:?} after {} rollouts",
            completed.rollouts
        );
        self.assert_few_events(completed).await;
        self.delete(&self.sets(), "web").await;
        self.delete(&self.sidecar_sets(), SIDECAR).await;
        let node_images = untyped(&self.admin, "apps.kruise.io", "v1beta1", "NodeImage", None);
        let kinds = [
            ("jobs", self.jobs()),
            ("requests", self.requests()),
            ("CloneSets", self.sets()),
            ("SidecarSets", self.sidecar_sets()),
            ("Pods", self.api("", "v1", "Pod")),
            ("revisions", revisions),
            ("barriers", self.api("", "v1", "ConfigMap")),
            (
                "revisions of SidecarSets",
                untyped(
                    &self.admin,
                    "apps",
                    "v1",
                    "ControllerRevision",
                    Some("kruise-system"),
                ),
            ),
            (
                "copies of secrets",
                untyped(&self.admin, "", "v1", "Secret", Some("kruise-daemon-config")),
            ),
        ];
        retry_until_ok("all that was made to go", || async {
            let mut leftovers: Vec<String> = Vec::new();
            for (kind, api) in &kinds {
                let names = list_names(api).await?.into_iter();
                // Kubernetes creates one in each namespace.
                let own_objects = names.filter(|name| name != "kube-root-ca.crt");
                leftovers.extend(own_objects.map(|name| format!("{kind}: {name}")));
            }
            let all = node_images.list(&ListParams::default()).await;
            for object in all.map_err(|why| why.to_string())?.items {
                let requested_images = json!(object)["spec"]["images"].as_object().cloned();
                leftovers.extend(
                    requested_images
                        .into_iter()
                        .flatten()
                        .map(|(name, _)| format!("images: {name}")),
                );
            }
            if leftovers.is_empty() {
                Ok(())
            } else {
                Err(leftovers.join(", "))
            }
        })
        .await;
    }

    /// Asserts that work done once has few events, however often programs were killed.
    async fn assert_few_events(&self, completed: &CompletedWork) {
        let events = untyped(&self.admin, "", "v1", "Event", None);
        let list = retry_until_ok("the events", || async {
            events.list(&ListParams::default()).await
        })
        .await;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for event in list.items.iter().map(|event| json!(event)) {
            let component = text(&event["reportingComponent"]);
            let about = text(&event["involvedObject"]["apiVersion"]);
            if component.starts_with("kruise-") || about.starts_with("apps.kruise.io/") {
                let what = format!(
                    "{component} {} {}",
                    event["involvedObject"]["kind"], event["reason"]
                );
                *counts.entry(what).or_default() += 1;
            }
        }
        println!("events: {counts:#?}");
        let all: usize = counts.values().sum();
        let work_items = completed.jobs + completed.requests + completed.rollouts * PODS;
        assert!(
            all <= MAX_EVENTS_PER_ITEM * work_items,
            "{all} events for {work_items} pieces of work: {counts:#?}"
        );
    }

    async fn push_image(&self, name: &str) {
        let (images, name) = (self.images.clone(), name.to_owned());
        let pushed = tokio::task::spawn_blocking(move || images.push(&name, &recording_image(&name))).await;
        pushed.unwrap().unwrap();
    }
}
