//! The same Pods, injected by the Go manager and by ours, from the same SidecarSets and revisions.

use std::cell::RefCell;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kruise_api::keys::{SIDECAR_SET_HASH, SIDECAR_SET_HASH_WITHOUT_IMAGE, SIDECAR_SET_INJECTED_LIST};
use kruise_api::sidecarset::SidecarSet;
use kruise_cluster::Cluster;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde::Deserialize;
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use crate::charts::{GoManager, start_rust_manager};
use crate::interop_cluster::create;
use crate::waits::{log_tails, poll_until};
use support::connect::connect;
use support::manager::Manager;

/// Both managers sort, because OpenKruise injects several sets in any order otherwise.
const GATES: &str = "SidecarSetPatchPodMetadataDefaultsAllowed=true,EnableSortSidecarContainerByName=true";
/// Those of the Go manager on a host.
const GO_GATES: &str = "EnableExternalCerts=false,TemplateNoDefaults=false";

/// Specs of SidecarSets without the selector, and the Pods that get them.
const SETS: &str = "
name: share
pods: [volumes, all]
spec:
  containers:
    - name: share
      image: example.com/share:1
      podInjectPolicy: AfterAppContainer
      shareVolumePolicy: { type: enabled }
      shareVolumeDevicePolicy: { type: enabled }
      volumeMounts: [{ name: own, mountPath: /own }, { name: own, mountPath: /data }]
    - name: alone
      image: example.com/alone:1
      ports: [{ containerPort: 80 }]
      livenessProbe: { httpGet: { port: 80 } }
  initContainers:
    - { name: zeta, image: example.com/setup:1, volumeMounts: [{ name: config, mountPath: /etc/config }] }
    - { name: beta, image: example.com/setup:1, podInjectPolicy: BeforeAppContainer }
  volumes:
    - { name: own, emptyDir: {} }
    - { name: config, configMap: { name: none, optional: true } }
    - { name: unused, emptyDir: {} }
    - { name: data, emptyDir: {} }
  imagePullSecrets: [{ name: registry }, { name: mirror }]
---
name: env
pods: [variables, all]
spec:
  containers:
    - name: env
      image: example.com/env:1
      env: [{ name: OWN, value: '1' }]
      transferEnv:
        - { sourceContainerName: app, envName: PLAIN }
        - { sourceContainerName: app, envNames: [FROM_FIELD, PLAIN, MISSING, OWN] }
        - sourceContainerNameFrom: { fieldRef: { fieldPath: \"metadata.labels['main']\" } }
          envName: OTHER
---
name: native
pods: [inits, all]
spec:
  updateStrategy: { type: NotUpdate }
  initContainers:
    - { name: proxy, image: example.com/proxy:1, restartPolicy: Always, env: [{ name: MODE, value: fast }] }
    - { name: agent, image: example.com/agent:1, restartPolicy: Always, podInjectPolicy: BeforeAppContainer }
    - { name: setup, image: example.com/setup:1, command: ['true'] }
---
name: metadata
pods: [annotated, all]
spec:
  containers: [{ name: metadata, image: example.com/metadata:1 }]
  patchPodMetadata:
    - { patchPolicy: Retain, annotations: { kept: theirs, new: theirs } }
    - { patchPolicy: Overwrite, annotations: { overwritten: theirs } }
    - { patchPolicy: MergePatchJson, annotations: { merged: '{\"b\": 2, \"c\": {\"d\": \"<&>\"}, \"gone\": null}' } }
---
name: hot
pods: [hot, all]
spec:
  containers:
    - name: hot
      image: example.com/hot:1
      upgradeStrategy: { upgradeType: HotUpgrade, hotUpgradeEmptyImage: example.com/empty:1 }
---
name: resources
pods: [amounts]
spec:
  containers:
    - name: sized
      image: example.com/sized:1
      resourcesPolicy:
        targetContainersMode: sum
        targetContainersNameRegex: ^app
        resourcesExpr:
          limits: { cpu: 'max(cpu*50%, 50m)', memory: 200Mi }
          requests: { cpu: 'max(cpu*20%, 10m)', memory: 'memory/3' }
---
name: replaces
pods: [replaced]
spec:
  containers: [{ name: log, image: example.com/log:1 }, { name: first, image: example.com/first:1 }]
  volumes: [{ name: data, emptyDir: {} }]
---
name: older
pods: [old]
spec:
  customVersion: v1
  containers: [{ name: old, image: example.com/old:1, volumeMounts: [{ name: past, mountPath: /past }] }]
  volumes: [{ name: past, emptyDir: {} }]
";

/// Pods, each with the label that the sets select.
const PODS: &str = "
name: volumes
spec:
  containers:
    - name: app
      image: example.com/app:1
      env: [{ name: SUB, valueFrom: { fieldRef: { fieldPath: metadata.name } } }]
      volumeMounts:
        - { name: data, mountPath: /data }
        - { name: data, mountPath: /logs, subPathExpr: $(SUB)/logs }
      volumeDevices: [{ name: disk, devicePath: /dev/disk }]
    - { name: second, image: example.com/app:1, volumeMounts: [{ name: data, mountPath: /second, readOnly: true }] }
  volumes: [{ name: data, emptyDir: {} }, { name: disk, persistentVolumeClaim: { claimName: disk } }]
  imagePullSecrets: [{ name: mirror }]
---
name: variables
labels: { main: second }
spec:
  containers:
    - name: app
      image: example.com/app:1
      env:
        - { name: PLAIN, value: a }
        - { name: FROM_FIELD, valueFrom: { fieldRef: { fieldPath: metadata.namespace } } }
        - { name: OWN, value: app }
    - { name: second, image: example.com/app:1, env: [{ name: OTHER, value: b }] }
---
name: inits
spec:
  initContainers: [{ name: migrate, image: example.com/app:1 }, { name: setup, image: example.com/app:1 }]
  containers: [{ name: app, image: example.com/app:1 }]
---
name: annotated
annotations: { kept: own, overwritten: own, merged: '{\"a\": 1, \"b\": 1, \"gone\": 1}' }
spec:
  containers: [{ name: app, image: example.com/app:1 }]
---
name: hot
spec:
  containers: [{ name: app, image: example.com/app:1 }]
---
name: amounts
spec:
  containers:
    - { name: app, image: example.com/app:1, resources: { requests: { cpu: 200m, memory: 1Gi }, limits: { cpu: '1' } } }
    - { name: app-2, image: example.com/app:1, resources: { requests: { cpu: 70m }, limits: { cpu: 300m } } }
---
name: replaced
spec:
  containers: [{ name: app, image: example.com/app:1 }, { name: log, image: example.com/app:1, args: [own] }]
---
name: old
spec:
  containers: [{ name: app, image: example.com/app:1 }]
---
name: all
labels: { main: app }
annotations: { overwritten: own }
spec:
  initContainers: [{ name: migrate, image: example.com/app:1 }]
  containers:
    - name: app
      image: example.com/app:1
      env: [{ name: PLAIN, value: a }, { name: OTHER, value: b }]
      volumeMounts: [{ name: data, mountPath: /data }]
  volumes: [{ name: data, emptyDir: {} }]
";

/// A SidecarSet, and the names of the Pods that it selects.
#[derive(Deserialize)]
struct SetCase {
    name: String,
    pods: Vec<String>,
    spec: Value,
}

#[derive(Deserialize)]
struct PodCase {
    name: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    spec: Value,
}

fn parse<T: for<'a> Deserialize<'a>>(text: &str) -> Vec<T> {
    let documents = serde_yaml::Deserializer::from_str(text);
    documents
        .map(|document| T::deserialize(document).unwrap())
        .collect()
}

impl PodCase {
    fn to_pod(&self) -> Pod {
        let mut labels = self.labels.clone();
        labels.insert("pod".to_owned(), self.name.clone());
        let mut spec = self.spec.clone();
        // The name of its volume is random.
        spec["automountServiceAccountToken"] = json!(false);
        let metadata = json!({ "name": self.name, "labels": labels, "annotations": self.annotations });
        serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
    }

    /// The Pod as the manager that runs injects it, once that has observed all of its sets.
    async fn inject(&self, admin: &Cluster, plane: &ControlPlane, sets: &[SetCase]) -> Value {
        let mut expected: Vec<&str> = sets
            .iter()
            .filter(|set| set.pods.contains(&self.name))
            .map(|set| set.name.as_str())
            .collect();
        expected.sort_unstable();
        let pods: Api<Pod> = Api::namespaced(admin.client.clone(), "default");
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let last = RefCell::new(String::new());
        let injected = async || {
            let answer = pods.create(&dry_run, &self.to_pod()).await;
            last.replace(format!("{answer:?}"));
            let pod = answer.ok()?;
            let names = pod.annotations().get(SIDECAR_SET_INJECTED_LIST)?.clone();
            without_times(pod).filter(|_| names == expected.join(","))
        };
        let logs = || {
            let log = plane.dir().join("peer/manager.log");
            format!("{}\n{}", last.borrow(), log_tails([log]))
        };
        poll_until(&format!("Pod {}: injected", self.name), &logs, injected).await
    }
}

/// The Pod without what differs between two requests; none if a record does not name its revision yet.
fn without_times(pod: Pod) -> Option<Value> {
    let mut pod = json!(pod);
    for field in ["creationTimestamp", "managedFields", "uid"] {
        pod["metadata"].as_object_mut()?.remove(field);
    }
    for annotation in [SIDECAR_SET_HASH, SIDECAR_SET_HASH_WITHOUT_IMAGE] {
        let text = &mut pod["metadata"]["annotations"][annotation];
        let mut records: BTreeMap<String, Value> = serde_json::from_str(text.as_str()?).ok()?;
        for record in records.values_mut() {
            record["updateTimestamp"].take();
            if annotation == SIDECAR_SET_HASH {
                record["controllerRevision"].as_str()?;
            }
        }
        *text = json!(records);
    }
    Some(pod)
}

/// Creates the sets; the last one is changed, and new Pods get its first revision.
async fn create_sets(admin: &Cluster, sets: &[SetCase]) {
    let api: Api<SidecarSet> = Api::all(admin.client.clone());
    let observed = async |name: &str| {
        let what = format!("SidecarSet {name}: observed");
        let is_observed = async || {
            let set = api.get(name).await.ok()?;
            let observed = set.status?.observed_generation;
            (observed == set.metadata.generation).then_some(())
        };
        poll_until(&what, &String::new, is_observed).await;
    };
    for set in sets {
        let mut spec = set.spec.clone();
        spec["selector"] =
            json!({ "matchExpressions": [{ "key": "pod", "operator": "In", "values": set.pods }] });
        if set.name == "env" {
            spec["namespaceSelector"] =
                json!({ "matchLabels": { "kubernetes.io/metadata.name": "default" } });
        }
        create(&api, json!({ "metadata": { "name": set.name }, "spec": spec })).await;
        observed(&set.name).await;
    }
    let container = json!({ "name": "old", "image": "example.com/old:2" });
    let strategy = json!({ "revision": { "customVersion": "v1" } });
    let patch = json!({ "spec": { "customVersion": "v2", "containers": [container], "volumes": [],
        "injectionStrategy": strategy, "updateStrategy": { "paused": true } } });
    let params = PatchParams::default();
    api.patch("older", &params, &Patch::Merge(patch)).await.unwrap();
    observed("older").await;
}

#[tokio::test]
async fn both_managers_inject_the_same() {
    let plane = &ControlPlane::start().unwrap();
    let admin = &connect(plane.kubeconfig()).await;
    // No controller creates it here.
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.client.clone(), "default");
    create(&accounts, json!({ "metadata": { "name": "default" } })).await;
    let (sets, pods): (Vec<SetCase>, Vec<PodCase>) = (parse(SETS), parse(PODS));
    let go_manager = GoManager::start_with_gates(plane, &format!("{GATES},{GO_GATES}"));
    create_sets(admin, &sets).await;
    let mut theirs = Vec::new();
    for pod in &pods {
        theirs.push(pod.inject(admin, plane, &sets).await);
    }
    let old = &theirs[7]["spec"]["containers"][0];
    assert_eq!(old["image"], "example.com/old:1", "the first revision");
    drop(go_manager);

    let gates = [format!("--feature-gates={GATES}")];
    let manager = Manager::on_free_ports_with(plane, "kruise-manager", &gates);
    let mut manager = start_rust_manager(plane, manager);
    for (pod, theirs) in pods.iter().zip(theirs) {
        let ours = pod.inject(admin, plane, &sets).await;
        for (name, field) in [("metadata", &theirs["metadata"]), ("spec", &theirs["spec"])] {
            assert_eq!(ours[name], *field, "Pod {}", pod.name);
        }
    }
    manager.stop().unwrap();
}
