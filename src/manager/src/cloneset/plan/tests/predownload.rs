//! Pulling ahead helps a rollout, and is never in its way.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{condition, kubelets, settle};
use super::histories::{container, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Concern, Failure, Plan, Subject};
use kruise_api::keys;
use kruise_workload::in_place::Pod;

/// A rollout whose job failed just now.
fn with_a_failure(lasting: bool) -> (World, Plan) {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let failure = Failure {
        of: Concern::PreDownload,
        until: world.now.checked_add(5.seconds()).unwrap(),
        lasting,
        of_resize: false,
        answered: true,
        message: "exceeded quota".to_owned(),
    };
    let job = format!("{}-app", world.revisions.last().unwrap().name);
    world.failures.insert(Subject::Job(job), failure);
    let (_, plan) = world.reconcile();
    assert!(!plan.acts.iter().any(|act| matches!(act, Act::CreateJob(_))));
    assert_eq!(condition(&world, "FailedUpdate"), None);
    let waiting = condition(&world, "Waiting").unwrap_or_default();
    assert!(!waiting.message.contains("quota"), "{}", waiting.message);
    (world, plan)
}

#[test]
fn a_job_that_is_refused_is_given_up() {
    let (mut world, _) = with_a_failure(true);
    assert!(
        world.revisions.last().unwrap().downloaded,
        "there is no more to do"
    );
    settle(&mut world);
    assert_eq!(world.jobs, Vec::<String>::new());
}

#[test]
fn a_job_that_may_yet_be_made_is_tried_again() {
    let (mut world, plan) = with_a_failure(false);
    assert!(
        plan.wake
            .is_some_and(|wake| wake <= world.now.checked_add(5.seconds()).unwrap())
    );
    world.now = world.now.checked_add(5.seconds()).unwrap();
    let (_, plan) = world.reconcile();
    assert!(plan.acts.iter().any(|act| matches!(act, Act::CreateJob(_))));
    world.reconcile();
    assert!(world.revisions.last().unwrap().downloaded);
}

#[test]
fn a_share_of_the_pods_is_updated_first() {
    for (least, pods) in [("50%", 2), ("26%", 2), ("1%", 1), ("0%", 0), ("some", 0)] {
        let mut world = World::new(spec(false, false));
        world.edit(&json!({ "replicas": 4 }));
        settle(&mut world);
        let key = keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS;
        world.set["metadata"]["annotations"] = json!({ key: least });
        container(&mut world, "image", json!("app:2"));
        let mut updated = 0;
        for _ in 0..50 {
            let (_, plan) = world.reconcile();
            if plan.acts.iter().any(|act| matches!(act, Act::CreateJob(_))) {
                break;
            }
            kubelets(&mut world);
            let ready = |pod: &&Value| {
                pod["spec"]["containers"][0]["image"] == "app:2" && Pod::of(pod).condition_ready()
            };
            updated = world.pods.values().filter(ready).count();
        }
        assert_eq!(updated, pods, "{least}");
    }
}
