//! What goes on while things break: image jobs, container recreates and rollouts, each begun once and followed to its end.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kruise::cluster::Cluster;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use xtask::cluster::{Image, Store};

use super::bed::Bed;
use super::enemy::RECOVERY;
use super::pods::{container, identities, name, runs};
use super::support::connect::connect;
use super::support::untyped::untyped;

const NAMESPACE: &str = "soak";
/// Pods of the CloneSet that is rolled out.
const PODS: usize = 3;

/// Where everything is made.
pub struct Work {
    admin: Cluster,
    images: Store,
    /// Pods append a line here whenever a container of theirs starts.
    starts: PathBuf,
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

/// An image that writes a line when it starts and ends at TERM, unlike any other by its name.
fn image(name: &str) -> Image {
    Image::busybox().script(&format!(
        "echo started >> /starts/$HOSTNAME-$NAME; trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done; : {name}"
    ))
}

fn pod_spec(starts: &str, image: &str, containers: &[&str]) -> Value {
    let containers: Vec<Value> = containers
        .iter()
        .map(|name| {
            json!({ "name": name, "image": image, "imagePullPolicy": "IfNotPresent",
                "env": [{ "name": "NAME", "value": name }],
                "volumeMounts": [{ "name": "starts", "mountPath": "/starts" }] })
        })
        .collect();
    json!({
        "terminationGracePeriodSeconds": 10,
        "volumes": [{ "name": "starts", "hostPath": { "path": starts, "type": "Directory" } }],
        "containers": containers,
    })
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
        let starts = bed.node.runtime.dir().join("starts");
        std::fs::create_dir_all(&starts).unwrap();
        let work = Self {
            admin,
            images: bed.node.runtime.registry.store().clone(),
            starts,
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
        let folder = work.starts.display().to_string();
        let web = ours(
            "CloneSet",
            "web",
            json!({
            "replicas": PODS,
            "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": { "labels": { "app": "web" } }, "spec": pod_spec(&folder, "soak/web:0", &["app"]) },
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
                "pullPolicy": { "backoffLimit": 50, "timeoutSeconds": 60 },
                "completionPolicy": { "type": "Always" } }),
            );
            self.create(&self.jobs(), job).await;
            tokio::time::sleep(Duration::from_secs(4)).await;
        }
        for number in 1..=made {
            let name = format!("job-{number}");
            let ended = |job: &Value| job["status"]["completionTime"].is_string();
            let job = self.until(&self.jobs(), &name, "to be complete", ended).await;
            let status = &job["status"];
            assert_eq!(
                (&status["succeeded"], &status["desired"]),
                (&json!(1), &json!(1)),
                "{job}"
            );
        }
        made
    }

    /// One Pod after the other, both containers of which are recreated once.
    async fn recreate(&self, until: Instant) -> usize {
        let (pods, mut made) = (self.api("", "v1", "Pod"), 0);
        let folder = self.starts.display().to_string();
        while Instant::now() < until {
            made += 1;
            let pod = format!("pod-{made}");
            let spec = pod_spec(&folder, "soak/once:1", &["a", "b"]);
            self.create(&pods, json!({ "metadata": { "name": pod }, "spec": spec }))
                .await;
            let ready = |pod: &Value| container(pod, "a").ready && container(pod, "b").ready;
            let before = self.until(&pods, &pod, "to be ready", ready).await;
            let name = format!("again-{made}");
            let request = ours(
                "ContainerRecreateRequest",
                &name,
                json!({ "podName": pod,
                "containers": [{ "name": "a" }, { "name": "b" }],
                "strategy": { "orderedRecreate": made % 2 == 0 } }),
            );
            self.create(&self.requests(), request).await;
            let ended = |request: &Value| request["status"]["completionTime"].is_string();
            let request = self.until(&self.requests(), &name, "to be complete", ended).await;
            let states = request["status"]["containerRecreateStates"].as_array().unwrap();
            assert!(
                states.len() == 2 && states.iter().all(|s| s["phase"] == "Succeeded"),
                "{request}"
            );
            let again = |now: &Value| {
                ["a", "b"]
                    .iter()
                    .all(|c| container(now, c).ready && container(now, c).id != container(&before, c).id)
            };
            self.until(&pods, &pod, "to be ready again", again).await;
        }
        made
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

    /// How often a container has started.
    fn starts(&self, pod: &str, container: &str) -> usize {
        let file = self.starts.join(format!("{pod}-{container}"));
        std::fs::read_to_string(file).unwrap_or_default().lines().count()
    }

    /// Nothing was done twice, and nothing is left over.
    pub async fn check(&self, done: &Done) {
        for number in 1..=done.requests {
            for container in ["a", "b"] {
                let starts = self.starts(&format!("pod-{number}"), container);
                assert_eq!(
                    starts, 2,
                    "container {container} of pod-{number} was to start once and then once more"
                );
            }
        }
        for pod in self.pods.keys() {
            assert_eq!(
                self.starts(pod, "app"),
                1 + done.rollouts,
                "{pod}: one start for each rollout"
            );
        }
        let all = ListParams::default();
        let jobs = insist("the jobs", || async { self.jobs().list(&all).await }).await;
        assert_eq!(jobs.items.len(), done.jobs);
        for job in jobs.items {
            let name = job.metadata.name.unwrap();
            insist("a job to be deleted", || async {
                self.jobs().delete(&name, &Default::default()).await
            })
            .await;
        }
        let secrets = untyped(&self.admin, "", "v1", "Secret", Some("kruise-daemon-config"));
        insist("jobs and copies of secrets to go", || async {
            let jobs = self.jobs().list(&all).await.map_err(|why| why.to_string())?.items;
            let copies = secrets.list(&all).await.map_err(|why| why.to_string())?.items;
            let left: Vec<String> = jobs.iter().chain(&copies).map(|o| name(&json!(o))).collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
        })
        .await;
    }

    async fn push(&self, name: &str) {
        let (images, name) = (self.images.clone(), name.to_owned());
        let pushed = tokio::task::spawn_blocking(move || images.push(&name, &image(&name))).await;
        pushed.unwrap().unwrap();
    }
}
