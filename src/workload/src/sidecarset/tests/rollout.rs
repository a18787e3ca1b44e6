//! Rollouts with a kubelet.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use kruise_api::keys;
use kruise_api::sidecarset::{SidecarSetSpec, SidecarSetStatus};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::in_place::Pod;
use crate::revision::Revision;
use crate::sidecarset::history::ListedRevision;
use crate::sidecarset::plan::{MAX_UPGRADES, Observed, Plan, Wait, plan};
use crate::sidecarset::recorded::{hot_upgrade_names, initial_versions};
use crate::sidecarset::upgrade::PodChanges;

const EMPTY: &str = "empty:1";
const BAD: &str = "mesh:bad";

struct Rollout {
    spec: SidecarSetSpec,
    annotations: BTreeMap<String, String>,
    generation: i64,
    status: SidecarSetStatus,
    pods: Vec<Value>,
    /// UIDs of Pods whose writes were refused a moment ago.
    refused: BTreeSet<String>,
}

impl Rollout {
    fn new(pods: usize, hot: bool, strategy: &Value) -> Self {
        let mut container = json!({ "name": "mesh", "image": "mesh:1" });
        if hot {
            container["upgradeStrategy"] =
                json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": EMPTY });
        }
        let spec = json!({ "containers": [container], "updateStrategy": strategy });
        let mut rollout = Self {
            spec: serde_json::from_value(spec).unwrap(),
            annotations: BTreeMap::new(),
            generation: 1,
            status: SidecarSetStatus::default(),
            pods: (0..pods).map(|at| injected_pod(at, hot)).collect(),
            refused: BTreeSet::new(),
        };
        rollout.set_image("mesh:1");
        (0..pods).for_each(|at| rollout.run_kubelet(at));
        rollout
    }

    /// The user's change: the hash is the image's.
    fn set_image(&mut self, image: &str) {
        let container = &mut self.spec.containers.as_mut().unwrap()[0];
        container.container.insert("image".to_owned(), json!(image));
        self.generation += 1;
        self.annotations = [
            (keys::SIDECAR_SET_HASH.to_owned(), image.to_owned()),
            (keys::SIDECAR_SET_HASH_WITHOUT_IMAGE.to_owned(), "w".to_owned()),
        ]
        .into();
    }

    fn read_pods(&self) -> Vec<Pod> {
        self.pods.iter().map(Pod::from_json).collect()
    }

    fn plan(&self) -> Plan {
        let (none, version) = (BTreeMap::new(), self.generation.to_string());
        let observed = Observed {
            name: "S",
            uid: "us",
            generation: self.generation,
            resource_version: &version,
            labels: &none,
            annotations: &self.annotations,
            spec: &self.spec,
            status: &self.status,
            refused: &self.refused,
            failed: &super::cluster::NONE_REFUSED,
        };
        let pods = self.read_pods();
        let pods: Vec<&Pod> = pods.iter().collect();
        let revisions: [ListedRevision<Revision>; 0] = [];
        plan(&observed, &pods, &revisions, Timestamp::UNIX_EPOCH)
    }

    fn reconcile(&mut self) -> Plan {
        let plan = self.plan();
        if let Some(status) = &plan.status {
            self.status = status.clone();
        }
        for (at, changes) in plan.flips.iter().chain(&plan.upgrades) {
            write(&mut self.pods[*at], changes);
        }
        for (at, condition) in &plan.conditions {
            let conditions = self.pods[*at]["status"]["conditions"].as_array_mut().unwrap();
            conditions.retain(|other| other["type"] != condition["type"]);
            conditions.push(condition.clone());
        }
        plan
    }

    /// Runs what the Pod's spec says.
    fn run_kubelet(&mut self, at: usize) {
        let pod = &mut self.pods[at];
        let containers = pod["spec"]["containers"].as_array().unwrap().clone();
        let statuses: Vec<Value> = containers
            .iter()
            .map(|c| {
                let image = c["image"].as_str().unwrap();
                json!({ "name": c["name"], "image": image, "imageID": format!("id-{image}"), "ready": image != BAD })
            })
            .collect();
        let ready = statuses.iter().all(|status| status["ready"] == true);
        pod["status"]["phase"] = json!("Running");
        pod["status"]["containerStatuses"] = json!(statuses);
        let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
        conditions.retain(|other| other["type"] != "Ready");
        conditions.push(json!({ "type": "Ready", "status": if ready { "True" } else { "False" } }));
    }

    fn counters(&self) -> (i32, i32, i32, i32) {
        let SidecarSetStatus {
            matched_pods,
            updated_pods,
            ready_pods,
            updated_ready_pods,
            ..
        } = self.status;
        (matched_pods, updated_pods, ready_pods, updated_ready_pods)
    }

    /// Reconciles and runs all kubelets until nothing changes.
    fn settle(&mut self) -> Plan {
        for _ in 0..10 * (self.pods.len() + 1) {
            let plan = self.reconcile();
            if plan.upgrades.is_empty() && plan.flips.is_empty() && plan.status.is_none() {
                return plan;
            }
            (0..self.pods.len()).for_each(|at| self.run_kubelet(at));
        }
        panic!("the rollout does not settle");
    }
}

fn injected_pod(at: usize, hot: bool) -> Value {
    let record = |hash: &str| format!(r#"{{"S":{{"hash":"{hash}"}}}}"#);
    let mut annotations = BTreeMap::from([
        (keys::SIDECAR_SET_HASH.to_owned(), record("mesh:1")),
        (keys::SIDECAR_SET_HASH_WITHOUT_IMAGE.to_owned(), record("w")),
        (keys::SIDECAR_SET_INJECTED_LIST.to_owned(), "S".to_owned()),
    ]);
    let mut containers = vec![json!({ "name": "main", "image": "app:1" })];
    if hot {
        let working = keys::SIDECAR_SET_WORKING_CONTAINER.to_owned();
        annotations.insert(working, r#"{"mesh":"mesh-1"}"#.to_owned());
        annotations.extend(
            initial_versions(&hot_upgrade_names("mesh")).map(|(key, version)| (key, version.to_owned())),
        );
        containers.push(json!({ "name": "mesh-1", "image": "mesh:1" }));
        containers.push(json!({ "name": "mesh-2", "image": EMPTY }));
    } else {
        containers.push(json!({ "name": "mesh", "image": "mesh:1" }));
    }
    json!({
        "metadata": { "name": format!("p{at}"), "uid": format!("u{at}"), "annotations": annotations },
        "spec": { "containers": containers },
        "status": { "conditions": [] },
    })
}

fn write(pod: &mut Value, changes: &PodChanges) {
    for (key, value) in &changes.annotations {
        pod["metadata"]["annotations"][key] = json!(value);
    }
    for container in pod["spec"]["containers"].as_array_mut().unwrap() {
        if let Some(image) = changes.images.get(container["name"].as_str().unwrap()) {
            container["image"] = json!(image);
        }
    }
}

#[test]
fn bad_image_stops_the_rollout_until_it_is_fixed() {
    let mut rollout = Rollout::new(2, false, &json!({ "maxUnavailable": 1 }));
    rollout.settle();
    assert_eq!(rollout.counters(), (2, 2, 2, 2));
    rollout.set_image(BAD);
    let plan = rollout.settle();
    assert_eq!(rollout.counters(), (2, 1, 1, 0));
    let expected = Wait::MaxUnavailable {
        held: vec![1],
        unavailable: 1,
        limit: 1,
    };
    assert_eq!(plan.waits, [expected, Wait::UpdatedNotReady(vec![0])]);
    rollout.set_image("mesh:2");
    let plan = rollout.settle();
    assert_eq!(rollout.counters(), (2, 2, 2, 2));
    assert!(plan.waits.is_empty());
}

#[test]
fn other_changes_are_for_new_pods() {
    let mut rollout = Rollout::new(2, false, &json!({}));
    rollout.settle();
    rollout.set_image("mesh:1");
    let hash = keys::SIDECAR_SET_HASH;
    rollout.annotations.insert(hash.to_owned(), "env".to_owned());
    let without_image = keys::SIDECAR_SET_HASH_WITHOUT_IMAGE;
    rollout
        .annotations
        .insert(without_image.to_owned(), "env".to_owned());
    rollout.refused.insert("u1".to_owned());
    let others = rollout.plan();
    assert_eq!(others.not_upgradable_event, 2);
    assert_eq!(
        others.conditions.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
        [0]
    );
    rollout.refused.clear();
    let first = rollout.reconcile();
    assert_eq!(first.not_upgradable_event, 2);
    assert_eq!(first.conditions.len(), 2);
    let plan = rollout.settle();
    assert_eq!(rollout.counters(), (2, 0, 2, 0));
    assert_eq!(plan.waits, [Wait::NotUpgradable(vec![0, 1])]);
    assert!(plan.conditions.is_empty(), "the conditions are written once");
    for pod in &rollout.pods {
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        let condition = conditions
            .iter()
            .find(|c| c["type"] == keys::SIDECAR_SET_UPGRADABLE)
            .unwrap();
        assert_eq!(condition["status"], "False");
        assert_eq!(condition["message"], r#"{"S":false}"#);
    }
}

#[test]
fn pod_with_an_invalid_annotation_delays_no_other() {
    let mut rollout = Rollout::new(3, false, &json!({ "maxUnavailable": 1 }));
    rollout.settle();
    let merge = json!([{ "annotations": { "ports": r#"{"mesh":1}"# }, "patchPolicy": "MergePatchJson" }]);
    rollout.spec.patch_pod_metadata = serde_json::from_value(merge).unwrap();
    rollout.pods[0]["metadata"]["annotations"]["ports"] = json!("no JSON");
    rollout.set_image("mesh:2");
    let plan = rollout.settle();
    assert_eq!(rollout.counters(), (3, 2, 3, 2));
    assert!(
        matches!(&plan.waits[..], [Wait::InvalidAnnotation(pods)] if pods[0].0 == 0),
        "{:?}",
        plan.waits
    );
    rollout.pods[0]["metadata"]["annotations"]["ports"] = json!("{}");
    assert!(rollout.settle().waits.is_empty());
    assert_eq!(rollout.counters(), (3, 3, 3, 3));
}

#[test]
fn one_plan_updates_a_bounded_number_of_pods() {
    let mut rollout = Rollout::new(MAX_UPGRADES + 3, false, &json!({ "maxUnavailable": "100%" }));
    rollout.set_image("mesh:2");
    assert_eq!(rollout.reconcile().upgrades.len(), MAX_UPGRADES);
    assert_eq!(rollout.reconcile().upgrades.len(), 3);
}

#[test]
fn hot_upgrades_alternate() {
    let mut rollout = Rollout::new(1, true, &json!({}));
    rollout.settle();
    for (image, expected) in [
        ("mesh:2", ["app:1", EMPTY, "mesh:2"]),
        ("mesh:3", ["app:1", "mesh:3", EMPTY]),
    ] {
        rollout.set_image(image);
        rollout.reconcile();
        let plan = rollout.plan();
        assert_eq!(plan.waits, [Wait::HotUpgrade(vec![0])]);
        rollout.settle();
        let pod = &rollout.read_pods()[0];
        let images: Vec<&str> = pod.containers.iter().map(|c| c.image.as_str()).collect();
        assert_eq!(images, expected);
        assert_eq!(rollout.counters(), (1, 1, 1, 1));
    }
}

#[test]
fn rollback_of_an_unfinished_hot_upgrade_keeps_the_first_container() {
    let mut rollout = Rollout::new(1, true, &json!({}));
    rollout.settle();
    let images = |rollout: &Rollout| -> Vec<String> {
        let pods = rollout.read_pods();
        let containers = pods[0].containers.iter();
        containers.map(|container| container.image.clone()).collect()
    };
    rollout.set_image(BAD);
    let plan = rollout.settle();
    assert_eq!(plan.waits, [Wait::HotUpgrade(vec![0])]);
    assert_eq!(images(&rollout), ["app:1", "mesh:1", BAD]);
    rollout.set_image("mesh:1");
    rollout.settle();
    assert_eq!(images(&rollout), ["app:1", "mesh:1", EMPTY]);
    assert_eq!(rollout.counters(), (1, 1, 1, 1));
    rollout.set_image("mesh:2");
    rollout.settle();
    assert_eq!(images(&rollout), ["app:1", EMPTY, "mesh:2"]);
}

#[test]
fn paused_and_not_update_name_the_outdated_pods() {
    for (strategy, expected) in [
        (json!({ "paused": true }), Wait::Paused { outdated: vec![0] }),
        (
            json!({ "type": "NotUpdate" }),
            Wait::NotUpdate { outdated: vec![0] },
        ),
    ] {
        let mut rollout = Rollout::new(1, true, &strategy);
        rollout.set_image("mesh:2");
        assert_eq!(rollout.settle().waits, [expected]);
    }
}

/// Indexes of the Pods that are ready, with containers that are consistent.
fn serving(rollout: &Rollout) -> BTreeSet<usize> {
    let pods = rollout.read_pods();
    let is_serving = |pod: &Pod| {
        let consistent = |c: &crate::in_place::Container| {
            pod.container_status(&c.name)
                .is_some_and(|status| status.image == c.image)
        };
        pod.condition_ready() && pod.containers.iter().all(consistent)
    };
    let pods = pods.iter().enumerate();
    pods.filter(|(_, pod)| is_serving(pod))
        .map(|(at, _)| at)
        .collect()
}

proptest! {
    /// In any order of events, a rollout keeps to its limits, ends, and leaves the Pods' own containers alone.
    #[test]
    fn rollouts_keep_limits_and_end(
        count in 1_usize..7,
        hot: bool,
        limit in 1_usize..4,
        partition in 0_usize..4,
        events in prop::collection::vec((0_u8..8, 0_usize..7), 0..60),
        last in 1_u8..5,
    ) {
        let strategy = json!({ "maxUnavailable": limit, "partition": partition });
        let mut rollout = Rollout::new(count, hot, &strategy);
        rollout.settle();
        for (event, at) in events {
            match event {
                0 => rollout.set_image(["mesh:2", "mesh:3", BAD][at % 3]),
                1..=3 => rollout.run_kubelet(at % count),
                _ => {
                    let before = serving(&rollout);
                    let plan = rollout.reconcile();
                    let taken = plan.upgrades.iter().filter(|(at, _)| before.contains(at)).count();
                    prop_assert!(taken <= limit, "{taken} ready Pods at once");
                }
            }
        }
        // Version 4 is new; with the others, some Pods are rolled back, and some that the partition keeps are updated.
        rollout.set_image(&format!("mesh:{last}"));
        rollout.settle();
        let expected = i32::try_from(count - partition.min(count)).unwrap();
        let (_, updated, _, updated_ready) = rollout.counters();
        prop_assert!(updated == expected || last < 4 && updated > expected, "{updated}, not {expected}");
        prop_assert_eq!(updated_ready, updated);
        for pod in rollout.read_pods() {
            prop_assert_eq!(&pod.containers[0].image, "app:1");
            // Those that the partition keeps may have an unfinished upgrade.
            let updated = pod.annotations[keys::SIDECAR_SET_HASH].contains(&format!(r#""hash":"mesh:{last}""#));
            if hot && updated {
                let empty = pod.containers.iter().filter(|c| c.image == EMPTY).count();
                prop_assert_eq!(empty, 1);
            }
        }
    }
}
