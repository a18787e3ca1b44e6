//! What goes on while things break: image jobs, container recreates and rollouts, each begun once and followed to its end.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::time::{Duration, Instant};

use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::{Image, Store};

use super::bed::Bed;
use super::enemy::RECOVERY;
use super::pods::{container, identities, name, runs, text};
use super::runs::Runs;
use support::connect::connect;
use support::untyped::untyped;

const NAMESPACE: &str = "soak";
/// Pods of the CloneSet that is rolled out.
const PODS: usize = 3;
/// Jobs, and Pods with their requests, that stay.
const KEPT: usize = 20;
/// Events for a piece of work, on the average; programs that were killed write some once more.
const EVENTS: usize = 3;
/// Old revisions that a CloneSet keeps.
const HISTORY: usize = 10;

/// Where everything is made.
pub struct Work {
    admin: Cluster,
    images: Store,
    runs: Runs,
    /// Name and UID of the CloneSet's Pods.
    pods: BTreeMap<String, String>,
}

/// What was begun and came to its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    pub jobs: usize,
    pub requests: usize,
    pub rollouts: usize,
}

/// An image that writes a line when it starts, and one when it ends at TERM; unlike any other by its name.
fn image(name: &str) -> Image {
    Image::busybox().script(&format!(
        "says() {{ echo $1 $(date -u +%T) >> /runs/$HOSTNAME.$NAME; }}; trap 'trap \"\" TERM; says stopped; exit 0' TERM; \
         says started; while :; do sleep 3600 & wait $!; done; : {name}"
    ))
}

/// A Pod that writes in this folder.
fn pod_spec(runs: &Runs, image: &str, containers: &[&str]) -> Value {
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

/// Gives the containers barriers that our manager lifts one after the other.
fn hold_back(pod: &str, spec: &mut Value) {
    let containers = spec["containers"].as_array_mut().into_iter().flatten();
    for (place, container) in (1..).zip(containers) {
        let key = json!({ "name": format!("{pod}-barrier"), "key": format!("p_{}", 10 - place) });
        let barrier = json!({ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": { "configMapKeyRef": key } });
        container["env"].as_array_mut().unwrap().push(barrier);
    }
}

/// Names of all objects of an API.
async fn names(api: &Api<DynamicObject>) -> Result<Vec<String>, String> {
    let list = api.list(&ListParams::default()).await;
    let objects = list.map_err(|why| why.to_string())?.items;
    Ok(objects.iter().map(|object| name(&json!(object))).collect())
}

/// Why a request failed, if it did.
fn reason(request: &Value) -> &str {
    let conditions = request["status"]["conditions"].as_array();
    let failed = conditions.into_iter().flatten().find(|c| c["type"] == "Failed");
    failed.and_then(|c| c["reason"].as_str()).unwrap_or_default()
}

/// An object of a kind of ours.
fn ours(kind: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

/// Asks until it is done, since what it asks may be away on purpose.
async fn insist<T, E: Display, F: Future<Output = Result<T, E>>>(what: &str, ask: impl Fn() -> F) -> T {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(done) => return done,
            Err(why) => assert!(
                start.elapsed() < RECOVERY,
                "{what}: still impossible after {RECOVERY:?}: {why}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

impl Work {
    /// Makes what goes on all the time.
    pub async fn start(bed: &Bed) -> Self {
        let admin = connect(bed.node.plane.kubeconfig()).await;
        let work = Self {
            admin,
            images: bed.node.runtime.registry.store().clone(),
            runs: Runs::of(bed),
            pods: BTreeMap::new(),
        };
        let namespaces = untyped(&work.admin, "", "v1", "Namespace", None);
        work.create(&namespaces, json!({ "metadata": { "name": NAMESPACE } }))
            .await;
        let accounts = work.api("", "v1", "ServiceAccount");
        insist("the default service account", || accounts.get("default")).await;
        let secret = json!({ "metadata": { "name": "login" }, "type": "kubernetes.io/dockerconfigjson",
            "stringData": { ".dockerconfigjson": bed.node.runtime.registry.docker_config() } });
        work.create(&work.api("", "v1", "Secret"), secret).await;
        for name in ["soak/web:0", "soak/once:1"] {
            work.push(name).await;
        }
        let web = ours(
            "CloneSet",
            "web",
            json!({
            "replicas": PODS,
            "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": { "labels": { "app": "web" } }, "spec": pod_spec(&work.runs, "soak/web:0", &["app"]) },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": 1 } } }),
        );
        work.create(&work.sets(), web).await;
        let pods = work.rolled_out("soak/web:0").await;
        Self {
            pods: identities(&pods),
            ..work
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

    /// Creates an object; one that is there already is that of an earlier try.
    async fn create(&self, api: &Api<DynamicObject>, object: Value) {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        insist("an object to be created", || async {
            match api.create(&PostParams::default(), &object).await {
                Ok(_) => Ok(()),
                Err(kube::Error::Api(why)) if why.code == 409 => Ok(()),
                Err(kube::Error::Api(why)) if [400, 422].contains(&why.code) => panic!("{object:?}: {why}"),
                Err(why) => Err(why),
            }
        })
        .await;
    }

    /// Waits until the object is as wanted.
    async fn until(
        &self,
        api: &Api<DynamicObject>,
        name: &str,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Value {
        insist(&format!("{name}: {what}"), || async {
            let object = api.get(name).await.map_err(|why| why.to_string())?;
            let object = json!(object);
            if wanted(&object) {
                Ok(object)
            } else {
                Err(object.to_string())
            }
        })
        .await
    }

    /// Begins work of each sort until then, and follows it to its end.
    pub async fn go_on(&self, until: Instant) -> Done {
        let (jobs, requests, rollouts) =
            tokio::join!(self.pull(until), self.recreate(until), self.roll_out(until));
        Done {
            jobs,
            requests,
            rollouts,
        }
    }

    /// A job for a new tag every few seconds, each fourth with a pull secret; all end well.
    async fn pull(&self, until: Instant) -> usize {
        let mut made = 0;
        while Instant::now() < until {
            made += 1;
            let image = format!("soak/ahead-{}:{made}", made % 8);
            let (images, other) = (self.images.clone(), image.clone());
            let tagged = tokio::task::spawn_blocking(move || images.tag("soak/once:1", &other)).await;
            tagged.unwrap().unwrap();
            let secrets = if made % 4 == 0 { vec!["login"] } else { vec![] };
            let job = ours(
                "ImagePullJob",
                &format!("job-{made}"),
                json!({
                "image": image, "pullSecrets": secrets,
                "pullPolicy": { "timeoutSeconds": 60 },
                "completionPolicy": { "type": "Always" } }),
            );
            self.create(&self.jobs(), job).await;
            if made > KEPT {
                self.pulled(made - KEPT).await;
            }
            tokio::time::sleep(Duration::from_secs(4)).await;
        }
        for number in (made + 1).saturating_sub(KEPT).max(1)..=made {
            self.pulled(number).await;
        }
        made
    }

    /// Waits for the end of a job, which is a good one, and deletes it.
    async fn pulled(&self, number: usize) {
        let name = format!("job-{number}");
        let ended = |job: &Value| job["status"]["completionTime"].is_string();
        let job = self.until(&self.jobs(), &name, "to be complete", ended).await;
        let status = &job["status"];
        let is = |field: &str| status[field] == 1;
        // Disks are full for longer than all tries of a job take.
        let why = &status["conditions"][0]["message"];
        let full = why
            .as_str()
            .is_some_and(|why| why.contains("the node's disk is full"));
        assert!(
            is("desired") && (is("succeeded") || is("failed") && full),
            "{job}"
        );
        self.delete(&self.jobs(), &name).await;
    }

    /// Deletes an object; one that is gone is that of an earlier try.
    async fn delete(&self, api: &Api<DynamicObject>, name: &str) {
        insist("an object to be deleted", || async {
            match api.delete(name, &Default::default()).await {
                Err(kube::Error::Api(why)) if why.code == 404 => Ok(()),
                deleted => deleted.map(drop),
            }
        })
        .await;
    }

    /// One Pod after the other, both containers of which are recreated once. Those of each third Pod start in order.
    async fn recreate(&self, until: Instant) -> usize {
        let (pods, mut made) = (self.api("", "v1", "Pod"), 0);
        while Instant::now() < until {
            made += 1;
            let pod = format!("pod-{made}");
            let mut spec = pod_spec(&self.runs, "soak/once:1", &["a", "b"]);
            if made % 3 == 0 {
                hold_back(&pod, &mut spec);
            }
            self.create(&pods, json!({ "metadata": { "name": pod }, "spec": spec }))
                .await;
            let ready = |pod: &Value| container(pod, "a").ready && container(pod, "b").ready;
            let before = self.until(&pods, &pod, "to be ready", ready).await;
            let mut request = self.request(&pod, &format!("again-{made}"), made % 2 == 0).await;
            // The manager ends a request that no daemon has taken up for a minute, as in an outage.
            for more in 1.. {
                if reason(&request) != "NoDaemon" {
                    break;
                }
                let now = insist("a Pod", || pods.get(&pod)).await;
                for name in ["a", "b"] {
                    assert_eq!(
                        container(&json!(now), name).id,
                        container(&before, name).id,
                        "{request}"
                    );
                }
                request = self
                    .request(&pod, &format!("again-{made}-{more}"), made % 2 == 0)
                    .await;
            }
            let states = request["status"]["containerRecreateStates"].as_array();
            assert!(
                states.is_some_and(|all| all.len() == 2 && all.iter().all(|s| s["phase"] == "Succeeded")),
                "{request}"
            );
            let again = |now: &Value| {
                ["a", "b"]
                    .iter()
                    .all(|c| container(now, c).ready && container(now, c).id != container(&before, c).id)
            };
            self.until(&pods, &pod, "to be ready again", again).await;
            // A node has room for so many only. What was done twice would have been done by now.
            if made > KEPT {
                self.recreated(made - KEPT).await;
            }
        }
        for number in (made + 1).saturating_sub(KEPT).max(1)..=made {
            self.recreated(number).await;
        }
        made
    }

    /// Checks that the containers of a Pod were stopped once each, and deletes it and its requests.
    async fn recreated(&self, number: usize) {
        let pod = format!("pod-{number}");
        for container in ["a", "b"] {
            self.runs.check(&pod, container, 1);
        }
        self.delete(&self.api("", "v1", "Pod"), &pod).await;
        let requests = self.requests();
        let all = insist("the requests", || names(&requests)).await;
        let (first, more) = (format!("again-{number}"), format!("again-{number}-"));
        for request in all
            .iter()
            .filter(|name| **name == first || name.starts_with(&more))
        {
            self.delete(&requests, request).await;
        }
    }

    /// Requests that both containers of the Pod are recreated, and waits for the end of that.
    async fn request(&self, pod: &str, name: &str, ordered: bool) -> Value {
        let request = ours(
            "ContainerRecreateRequest",
            name,
            json!({ "podName": pod,
            "containers": [{ "name": "a" }, { "name": "b" }],
            "strategy": { "orderedRecreate": ordered } }),
        );
        self.create(&self.requests(), request).await;
        let ended = |request: &Value| request["status"]["completionTime"].is_string();
        self.until(&self.requests(), name, "to be complete", ended).await
    }

    /// One rollout after the other, in place.
    async fn roll_out(&self, until: Instant) -> usize {
        let mut made = 0;
        while Instant::now() < until {
            made += 1;
            let image = format!("soak/web:{made}");
            self.push(&image).await;
            let patch = json!([{ "op": "replace", "path": "/spec/template/spec/containers/0/image", "value": image }]);
            let patch = Patch::Json::<()>(serde_json::from_value(patch).unwrap());
            let (sets, params) = (self.sets(), PatchParams::default());
            insist("a new image", || sets.patch("web", &params, &patch)).await;
            let pods = self.rolled_out(&image).await;
            assert_eq!(identities(&pods), self.pods, "Pods were replaced");
        }
        made
    }

    /// Waits until the CloneSet runs the image on all Pods, and says so.
    async fn rolled_out(&self, image: &str) -> Vec<Value> {
        self.until(&self.sets(), "web", &format!("to run {image}"), |set| {
            let status = &set["status"];
            let counts = ["updatedReadyReplicas", "readyReplicas", "replicas"];
            status["observedGeneration"] == set["metadata"]["generation"]
                && counts.iter().all(|c| status[c] == PODS)
        })
        .await;
        let (api, selector) = (self.api("", "v1", "Pod"), ListParams::default().labels("app=web"));
        let list = insist("the CloneSet's Pods", || api.list(&selector)).await;
        let pods: Vec<Value> = list.items.into_iter().map(|pod| json!(pod)).collect();
        assert!(
            pods.len() == PODS && pods.iter().all(|pod| runs(pod, image)),
            "{image}: {pods:#?}"
        );
        pods
    }

    /// Nothing was done twice, and nothing is left over.
    pub async fn check(&self, done: &Done) {
        for pod in self.pods.keys() {
            self.runs.check(pod, "app", done.rollouts);
        }
        let revisions = self.api("apps", "v1", "ControllerRevision");
        let all = insist("the revisions", || names(&revisions)).await;
        assert!(
            all.len() <= HISTORY + 2,
            "{all:?} after {} rollouts",
            done.rollouts
        );
        self.check_events(done).await;
        self.delete(&self.sets(), "web").await;
        let node_images = untyped(&self.admin, "apps.kruise.io", "v1beta1", "NodeImage", None);
        let kinds = [
            ("jobs", self.jobs()),
            ("requests", self.requests()),
            ("CloneSets", self.sets()),
            ("Pods", self.api("", "v1", "Pod")),
            ("revisions", revisions),
            ("barriers", self.api("", "v1", "ConfigMap")),
            (
                "copies of secrets",
                untyped(&self.admin, "", "v1", "Secret", Some("kruise-daemon-config")),
            ),
        ];
        insist("all that was made to go", || async {
            let mut left: Vec<String> = Vec::new();
            for (kind, api) in &kinds {
                let names = names(api).await?.into_iter();
                // Kubernetes puts one into each namespace.
                let made = names.filter(|name| name != "kube-root-ca.crt");
                left.extend(made.map(|name| format!("{kind}: {name}")));
            }
            let all = node_images.list(&ListParams::default()).await;
            for object in all.map_err(|why| why.to_string())?.items {
                let asked = json!(object)["spec"]["images"].as_object().cloned();
                left.extend(
                    asked
                        .into_iter()
                        .flatten()
                        .map(|(name, _)| format!("images: {name}")),
                );
            }
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
        })
        .await;
    }

    /// Of what is done once there are few events, however often programs were killed.
    async fn check_events(&self, done: &Done) {
        let events = untyped(&self.admin, "", "v1", "Event", None);
        let list = insist("the events", || async {
            events.list(&ListParams::default()).await
        })
        .await;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for event in list.items.iter().map(|event| json!(event)) {
            let by = text(&event["reportingComponent"]);
            let about = text(&event["involvedObject"]["apiVersion"]);
            if by.starts_with("kruise-") || about.starts_with("apps.kruise.io/") {
                let what = format!("{by} {} {}", event["involvedObject"]["kind"], event["reason"]);
                *counts.entry(what).or_default() += 1;
            }
        }
        println!("events: {counts:#?}");
        let all: usize = counts.values().sum();
        let work = done.jobs + done.requests + done.rollouts * PODS;
        assert!(
            all <= EVENTS * work,
            "{all} events for {work} pieces of work: {counts:#?}"
        );
    }

    async fn push(&self, name: &str) {
        let (images, name) = (self.images.clone(), name.to_owned());
        let pushed = tokio::task::spawn_blocking(move || images.push(&name, &image(&name))).await;
        pushed.unwrap().unwrap();
    }
}
