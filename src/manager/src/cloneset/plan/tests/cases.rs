//! Single decisions, each as a story.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::faults::Fault;
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Concern, Failure, Plan, Subject, Why};
use kruise_api::cloneset::CloneSetCondition;
use kruise_api::keys;
use kruise_workload::in_place::Target;

/// Passes and kubelets until a pass does nothing.
pub(super) fn settle(world: &mut World) {
    for _ in 0..100 {
        let (_, plan) = world.reconcile();
        let before = world.pods.clone();
        kubelets(world);
        if plan.acts.is_empty() && plan.status.is_none() && before == world.pods {
            return;
        }
        world.now = world.now.checked_add(1.second()).unwrap();
    }
    panic!("no end in sight: {:#}", world.set["status"]);
}

pub(super) fn kubelets(world: &mut World) {
    let names: Vec<String> = world.pods.keys().cloned().collect();
    names.iter().for_each(|name| world.kubelet(name));
}

pub(super) fn condition(world: &World, type_: &str) -> Option<CloneSetCondition> {
    let conditions = &world.set["status"]["conditions"];
    let conditions: Vec<CloneSetCondition> = serde_json::from_value(conditions.clone()).unwrap_or_default();
    conditions.into_iter().find(|c| c.type_ == type_)
}

/// The reason of condition Progressing, which is there with a deadline only.
pub(super) fn reason(world: &World) -> String {
    let mut world = world.clone();
    if world.set["spec"]["progressDeadlineSeconds"].is_null() {
        world.set["spec"]["progressDeadlineSeconds"] = json!(1_000_000);
        world.reconcile();
    }
    condition(&world, "Progressing").unwrap().reason
}

/// What is waited for.
pub(super) fn waits(world: &World) -> String {
    condition(world, "Waiting").unwrap_or_default().message
}

fn patches(plan: &Plan) -> Vec<(Why, Vec<Target>)> {
    let patches = plan.acts.iter().filter_map(|act| match act {
        Act::PatchPod { why, writes, .. } => Some((*why, writes.iter().map(|w| w.to).collect())),
        _ => None,
    });
    patches.collect()
}

fn one(spec: Value) -> World {
    let mut world = World::new(spec);
    world.edit(&json!({ "replicas": 1 }));
    world
}

#[test]
fn a_new_pod_takes_two_writes() {
    let mut world = one(spec(false, true));
    let (_, plan) = world.reconcile();
    let Act::CreatePod { name, pod, claims } = &plan.acts[0] else {
        panic!("{plan:?}")
    };
    let id = name.strip_prefix("s-").unwrap();
    assert_eq!(pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID], id);
    assert_eq!(
        pod["metadata"]["labels"][keys::LIFECYCLE_STATE],
        "PreparingNormal"
    );
    let update = world.revisions.last().unwrap().name.clone();
    assert_eq!(pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH], update);
    assert_eq!(
        pod["metadata"]["labels"][keys::POD_TEMPLATE_HASH],
        update.strip_prefix("s-").unwrap()
    );
    assert_eq!(pod["metadata"]["ownerReferences"][0]["kind"], "CloneSet");
    let gates = json!([{ "conditionType": "InPlaceUpdateReady" }, { "conditionType": "KruisePodReady" }]);
    assert_eq!(pod["spec"]["readinessGates"], gates);
    assert_eq!(
        pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"],
        format!("data-s-{id}")
    );
    assert_eq!(claims[0]["metadata"]["labels"]["app"], "x");
    let (_, plan) = world.reconcile();
    assert!(
        plan.acts.is_empty(),
        "a Pod without a node needs nothing: {plan:?}"
    );
    kubelets(&mut world);
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), [(Why::State, vec![Target::Status])]);
    settle(&mut world);
    assert_eq!(reason(&world), "CloneSetAvailable");
}

#[test]
fn claims_have_the_metadata_of_their_template() {
    let mut spec = spec(false, true);
    let metadata = json!({ "name": "data", "labels": { "l": "1" }, "annotations": { "a": "2" },
        "finalizers": ["example.io/backup"] });
    spec["volumeClaimTemplates"][0]["metadata"] = metadata;
    let (_, plan) = one(spec).reconcile();
    let Act::CreatePod { claims, .. } = &plan.acts[0] else {
        panic!("{plan:?}")
    };
    let has = &claims[0]["metadata"];
    assert_eq!([&has["labels"]["l"], &has["annotations"]["a"]], ["1", "2"]);
    assert_eq!(has["finalizers"], json!(["example.io/backup"]));
}

#[test]
fn an_update_in_place_takes_three_writes() {
    let mut world = one(spec(false, false));
    settle(&mut world);
    let uid = world.pods.values().next().unwrap()["metadata"]["uid"].clone();
    container(&mut world, "image", json!("app:2"));
    let (_, plan) = world.reconcile();
    assert_eq!(
        patches(&plan),
        [(Why::UpdateInPlace, vec![Target::Status, Target::Pod])]
    );
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), []);
    assert_eq!(plan.status.unwrap().updated_replicas, 1);
    let why = waits(&world);
    assert!(
        why.contains("container app: the old one has not been replaced yet"),
        "{why}"
    );
    kubelets(&mut world);
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), [(Why::State, vec![Target::Status])]);
    settle(&mut world);
    assert_eq!(world.pods.values().next().unwrap()["metadata"]["uid"], uid);
    assert_eq!(reason(&world), "CloneSetAvailable");
}

#[test]
fn metadata_alone_takes_one_write_and_no_readiness() {
    let mut world = one(spec(false, false));
    settle(&mut world);
    world.edit(&json!({ "template": { "metadata": { "labels": { "new": "1" } } } }));
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), [(Why::UpdateInPlace, vec![Target::Pod])]);
    assert_eq!(
        world.pods.values().next().unwrap()["metadata"]["labels"]["new"],
        "1"
    );
    let (_, plan) = world.reconcile();
    assert!(plan.acts.is_empty());
    assert_eq!(reason(&world), "CloneSetAvailable");
}

#[test]
fn quota_is_told_and_forgotten() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    world.edit(&json!({ "replicas": 7 }));
    let until = world.now.checked_add(5.seconds()).unwrap();
    let failure = Failure {
        of: Concern::Scale,
        until,
        lasting: false,
        of_resize: false,
        answered: true,
        message: "exceeded quota".to_owned(),
    };
    world.failures.insert(Subject::Creation, failure);
    container(&mut world, "image", json!("app:2"));
    let (_, plan) = world.reconcile();
    assert!(
        !plan.acts.iter().any(|a| matches!(a, Act::CreatePod { .. })),
        "it is too early"
    );
    assert_eq!(plan.wake, Some(until));
    assert_eq!(
        condition(&world, "FailedScale").unwrap().message,
        "exceeded quota"
    );
    assert!(waits(&world).contains("exceeded quota"));
    world.now = until;
    let (_, plan) = world.reconcile();
    assert_eq!(
        plan.acts
            .iter()
            .filter(|a| matches!(a, Act::CreatePod { .. }))
            .count(),
        2
    );
    assert_eq!(condition(&world, "FailedScale"), None);
    settle(&mut world);
}

#[test]
fn what_cannot_be_done_in_place_is_told() {
    let mut world = one(spec(false, false));
    rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    settle(&mut world);
    container(&mut world, "command", json!(["else"]));
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), []);
    let why = condition(&world, "FailedUpdate").unwrap().message;
    assert!(
        why.contains("template.spec.containers.0.command.0 cannot be changed in place"),
        "{why}"
    );
    container(&mut world, "command", json!(["run"]));
    world.reconcile();
    assert_eq!(condition(&world, "FailedUpdate"), None);
}

#[test]
fn orphans_are_adopted_and_replaced_within_the_limit() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    for pod in world.pods.values_mut() {
        pod["metadata"]["ownerReferences"] = json!([]);
        pod["metadata"]["labels"] = json!({ "app": "x", "pod-template-hash": "of-a-deployment" });
        pod["spec"]["readinessGates"] = json!([]);
    }
    world.set["status"] = json!(null);
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), vec![(Why::Adopt, vec![Target::Pod]); 5]);
    assert_eq!(plan.acts.len(), 5, "no Pod is made while there are some to adopt");
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), [(Why::UpdateReCreate, vec![Target::Pod])]);
    settle(&mut world);
    assert_eq!(reason(&world), "CloneSetAvailable");
    let stray = world.pods.values_mut().next().unwrap();
    stray["metadata"]["labels"]["app"] = json!("y");
    let (_, plan) = world.reconcile();
    assert_eq!(patches(&plan), [(Why::Release, vec![Target::Pod])]);
}

/// As OpenKruise leaves them: a Pod with these labels that somebody runs beside a CloneSet is none of its business, and a
/// name of such a Pod among those to delete means nothing.
#[test]
fn orphans_that_a_cloneset_meets_later_are_left_alone() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    let before = world.pods.clone();
    let stray = json!({ "metadata": { "labels": { "app": "x" } },
        "spec": { "containers": [{ "name": "app", "image": "app:1" }] } });
    world.create("stray", stray);
    world.edit(&json!({ "scaleStrategy": { "podsToDelete": ["stray"] } }));
    settle(&mut world);
    assert!(
        world
            .pods
            .remove("stray")
            .is_some_and(|pod| pod["metadata"]["ownerReferences"].is_null())
    );
    assert_eq!(world.pods, before);
    assert_eq!(world.set["spec"]["scaleStrategy"]["podsToDelete"], json!(null));
}

#[test]
fn a_cloneset_is_new_until_it_has_all_orphans() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    world.orphan();
    (world.failing, world.fault) = (2, Fault::Refused);
    world.reconcile();
    assert_eq!(world.set["status"]["observedGeneration"], json!(null));
    world.now += 1.hour();
    settle(&mut world);
    assert_eq!(
        world.set["status"]["observedGeneration"],
        world.set["metadata"]["generation"]
    );
    assert!(
        world
            .pods
            .values()
            .all(|pod| pod["metadata"]["ownerReferences"][0]["uid"] == "set")
    );
    assert_eq!(world.pods.len(), 5);
}

/// Nothing is made while an adoption is only late: the Pods of a Deployment would be deleted for it.
#[test]
fn an_adoption_that_fails_at_first_costs_no_pod() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    let before: Vec<String> = world.pods.keys().cloned().collect();
    world.orphan();
    (world.failing, world.fault) = (2, Fault::Refused);
    world.reconcile();
    assert_eq!(world.failing, 0);
    let (_, plan) = world.reconcile();
    assert!(plan.acts.is_empty(), "{:?}", plan.acts);
    world.now = plan.wake.unwrap();
    settle(&mut world);
    assert!(
        before.iter().eq(world.pods.keys()),
        "{before:?}: {:?}",
        world.pods.keys()
    );
    let ours = |pod: &Value| pod["metadata"]["ownerReferences"][0]["uid"] == "set";
    assert!(world.pods.values().all(ours));
}

#[test]
fn what_is_late_says_what_it_waits_for() {
    let mut world = one(spec(false, false));
    settle(&mut world);
    container(&mut world, "image", json!("app:bad"));
    world.edit(&json!({ "progressDeadlineSeconds": 60 }));
    let (_, plan) = world.reconcile();
    assert_eq!(reason(&world), "CloneSetUpdated");
    assert!(plan.wake.is_some_and(|wake| wake > world.now));
    world.now = plan.wake.unwrap();
    kubelets(&mut world);
    world.reconcile();
    assert_eq!(reason(&world), "ProgressDeadlineExceeded");
    let why = waits(&world);
    assert!(why.contains("ImagePullBackOff of image app:bad"), "{why}");
}

#[test]
fn images_are_pulled_ahead_once() {
    let mut world = World::new(spec(false, false));
    let ahead = json!({ "imagePreDownloadParallelism": 3, "imagePreDownloadMinUpdatedReadyPods": 1 });
    rolling(
        &mut world,
        json!({ "inPlaceUpdateStrategy": ahead, "partition": "80%" }),
    );
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let (_, plan) = world.reconcile();
    assert!(
        !plan.acts.iter().any(|a| matches!(a, Act::CreateJob(_))),
        "no Pod is updated yet"
    );
    settle(&mut world);
    let update = world.revisions.last().unwrap().clone();
    assert_eq!(world.jobs, [format!("{}-app", update.name)]);
    assert!(update.downloaded);
    rolling(&mut world, json!({ "partition": 0 }));
    settle(&mut world);
    assert_eq!(world.jobs, Vec::<String>::new());
}

#[test]
fn a_job_says_what_to_pull_and_for_whom() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let (_, plan) = world.reconcile();
    let job = plan.acts.iter().find_map(|a| match a {
        Act::CreateJob(job) => Some(json!(job)),
        _ => None,
    });
    let (job, revision) = (job.unwrap(), &world.revisions.last().unwrap().name);
    let hash = revision.strip_prefix("s-").unwrap();
    assert_eq!(
        job["metadata"]["labels"],
        json!({ "app": "x", keys::REVISION_HASH: hash })
    );
    assert_eq!(job["spec"]["image"], "app:2");
    assert_eq!(job["spec"]["parallelism"], 1);
    assert_eq!(
        job["spec"]["pullPolicy"],
        json!({ "timeoutSeconds": 300, "backoffLimit": 1 })
    );
    assert_eq!(
        job["spec"]["completionPolicy"],
        json!({ "type": "Always", "ttlSecondsAfterFinished": 600 })
    );
    let not_updated =
        json!([{ "key": keys::CONTROLLER_REVISION_HASH, "operator": "NotIn", "values": [revision, hash] }]);
    assert_eq!(job["spec"]["podSelector"]["matchExpressions"], not_updated);
}

#[test]
fn claims_go_with_pods_that_others_delete_unless_they_are_reused() {
    for reuse in [false, true] {
        let mut world = one(spec(false, true));
        world.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut world);
        let claim = world.claims.keys().next().unwrap().clone();
        let name = world.pods.keys().next().unwrap().clone();
        world.delete(&name);
        settle(&mut world);
        assert_eq!(world.claims.contains_key(&claim), reuse);
        assert_eq!(
            world.pods.contains_key(&name),
            reuse,
            "a Pod's name follows its claim"
        );
    }
}

#[test]
fn named_pods_go_and_their_names_too() {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    let name = world.pods.keys().next().unwrap().clone();
    world.edit(&json!({ "replicas": 4, "scaleStrategy": { "podsToDelete": [name.clone()] } }));
    settle(&mut world);
    assert!(!world.pods.contains_key(&name) && world.pods.len() == 4);
    assert!(world.set["spec"]["scaleStrategy"].get("podsToDelete").is_none());
}

/// What is to be deleted waits for a Pod that waits for its place.
#[test]
fn a_broken_old_pod_does_not_keep_the_place_of_a_new_one() {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": 3 }));
    rolling(&mut world, json!({ "partition": 1 }));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    settle(&mut world);
    let of = |pod: &Value| pod["spec"]["containers"][0]["image"].clone();
    let (old, new) = {
        let find = |image: &str| {
            world
                .pods
                .iter()
                .find(|(_, pod)| of(pod) == image)
                .unwrap()
                .0
                .clone()
        };
        (find("app:1"), find("app:2"))
    };
    world.pods.get_mut(&old).unwrap()["spec"]["containers"][0]["image"] = json!("app:bad");
    kubelets(&mut world);
    rolling(
        &mut world,
        json!({ "partition": 0, "maxUnavailable": 0, "maxSurge": 1 }),
    );
    world.edit(&json!({ "replicas": 2, "scaleStrategy": { "podsToDelete": [new] } }));
    settle(&mut world);
    assert_eq!(reason(&world), "CloneSetAvailable");
    assert!(!world.pods.contains_key(&new) && world.pods.len() == 2);
}
