//! Pulling ahead helps a rollout, and is never in its way.

use jiff::ToSpan;
use serde_json::json;

use super::cases::{condition, settle};
use super::histories::{container, spec};
use super::world::World;
use crate::manager::cloneset::plan::{Act, Concern, Failure, Plan, Subject};

/// A rollout whose job failed just now.
fn with_a_failure(lasting: bool) -> (World, Plan) {
    let mut world = World::new(spec(false, false));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let failure = Failure {
        of: Concern::PreDownload,
        until: world.now.checked_add(5.seconds()).unwrap(),
        lasting,
        message: "exceeded quota".to_owned(),
    };
    let job = format!("{}-app", world.revisions.last().unwrap().name);
    world.failures.insert(Subject::Job(job), failure);
    let (_, plan) = world.reconcile();
    assert!(!plan.acts.iter().any(|act| matches!(act, Act::CreateJob(_))));
    assert_eq!(condition(&world, "FailedUpdate"), None);
    let progressing = condition(&world, "Progressing").unwrap();
    assert!(!progressing.message.contains("quota"), "{}", progressing.message);
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
