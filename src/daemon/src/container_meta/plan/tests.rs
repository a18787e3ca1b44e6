//! Long random histories of a Pod: whatever happens, published metadata is true, and only necessary restarts happen.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::fake_pod::{FakePod, PodEvent};
use super::*;

fn any_event() -> impl Strategy<Value = PodEvent> {
    prop_oneof![
        4 => (0_usize..3).prop_map(PodEvent::Start),
        2 => (0_u8..3).prop_map(PodEvent::Label),
        1 => (0_usize..3, 0_u8..3).prop_map(|(at, image)| PodEvent::Image(at, image)),
        2 => any::<bool>().prop_map(PodEvent::Updating),
        1 => any::<bool>().prop_map(PodEvent::RuntimeAnswers),
        1 => any::<bool>().prop_map(PodEvent::ApiAcceptsWrites),
        3 => Just(PodEvent::WatchUpdate),
        1 => Just(PodEvent::Crash),
        2 => (0_u64..40).prop_map(PodEvent::Wait),
    ]
}

proptest! {
    /// Whatever happens, each step is valid. Once the events end, all metadata is published and every environment
    /// matches the Pod's metadata, with at most one write for each start of a container (and one for each write that
    /// the watch never showed).
    #[test]
    fn container_meta_is_true_and_environments_converge(
        follows in prop::collection::vec(any::<bool>(), 1..=3),
        ops in prop::collection::vec(any_event(), 0..60),
    ) {
        let mut world = FakePod::new(&follows);
        for op in &ops {
            world.apply(op);
        }
        world.converge();
        let published = world.published.clone().expect("published");
        world.check_meta(&published);
        for c in &world.containers {
            let entry = published.containers.iter().find(|entry| entry.name == c.name).expect("an entry each");
            prop_assert_eq!(&entry.container_id, &c.id());
            prop_assert!(!c.env_follows_label || c.created_with.1 == world.label, "{} has an old environment", c.name);
        }
        let most = world.starts + world.expired_writes;
        prop_assert!(world.writes <= most, "{} writes, {} at most", world.writes, most);
        // At rest there is no runtime call and no write, even by a daemon that has just started.
        world.state = PodMetaState::default();
        prop_assert_eq!(world.plan(), Plan::default());
    }
}

/// A Pod in an update, with these containers created and published.
fn updating_pod(env_follows_label: &[bool]) -> FakePod {
    let mut world = FakePod::new(env_follows_label);
    (0..env_follows_label.len()).for_each(|at| world.start_container(at));
    world.reconcile();
    world.published = world.stored.clone();
    world.reconcile();
    world.now += KUBELET_RESYNC_DELAY;
    world.updating = true;
    world.reconcile();
    world
}

#[test]
fn first_containers_share_one_annotation_write() {
    let mut world = FakePod::new(&[true, false, false]);
    for at in 0..3 {
        assert_eq!(world.writes, 0);
        world.start_container(at);
        world.reconcile();
    }
    assert_eq!(world.writes, 1);
    // A container that never starts delays the others only for a limited time.
    let mut world = FakePod::new(&[true, false]);
    world.start_container(0);
    assert_eq!(world.reconcile(), (false, Some(FIRST_WRITE_DELAY)));
    world.now += FIRST_WRITE_DELAY;
    world.reconcile();
    assert_eq!((world.writes, world.stored.unwrap().containers.len()), (1, 1));
}

#[test]
fn env_restart_waits_for_kubelet_resync() {
    let mut world = updating_pod(&[true, false]);
    world.label = 1;
    let due = world.now + KUBELET_RESYNC_DELAY;
    assert_eq!(world.reconcile(), (false, Some(due)));
    // An unrelated change meanwhile makes no difference.
    world.unrelated_label = 1;
    world.now += KUBELET_RESYNC_DELAY / 2;
    assert_eq!(world.reconcile(), (false, Some(due)));
    world.now = due;
    world.reconcile();
    assert_eq!(world.stopped, ["rt://c-1"]);
    // A different change restarts the delay, and so does a new daemon or a new Pod.
    type Change = fn(&mut FakePod);
    let changes: [Change; 3] = [
        |world| world.label = 2,
        |world| world.state = PodMetaState::default(),
        |world| world.state.pod_uid = "other".to_owned(),
    ];
    for change in changes {
        let mut world = updating_pod(&[true, false]);
        world.label = 1;
        world.reconcile();
        world.now += KUBELET_RESYNC_DELAY / 2;
        change(&mut world);
        assert_eq!(world.reconcile(), (false, Some(world.now + KUBELET_RESYNC_DELAY)));
    }
}

#[test]
fn no_env_restart_outside_an_in_place_update() {
    let mut world = updating_pod(&[true]);
    (world.label, world.updating) = (1, false);
    assert_eq!(world.plan(), Plan::default());
    world.now += KUBELET_RESYNC_DELAY;
    assert_eq!(world.plan(), Plan::default());
    world.updating = true;
    assert_eq!(world.plan().restart.len(), 1);
}

#[test]
fn retry_waits_for_resync_of_newer_environment() {
    let mut world = updating_pod(&[true]);
    world.label = 1;
    world.reconcile();
    world.now += KUBELET_RESYNC_DELAY;
    world.state.begin_restart("rt://c-1");
    world
        .state
        .finish_restart("rt://c-1".to_owned(), false, world.now);
    world.label = 2;
    assert_eq!(world.reconcile(), (false, Some(world.now + KUBELET_RESYNC_DELAY)));
}

/// As long as the readiness gate is not True, it may be waiting for the daemon's write.
#[test]
fn write_during_update_waits_for_the_readiness_gate() {
    for opened in [false, true] {
        let mut world = updating_pod(&[false]);
        world.containers[0].image = 1;
        world.start_container(0);
        let due = world.now + GATE_DELAY;
        assert_eq!(world.reconcile(), (false, Some(due)));
        world.now += GATE_DELAY / 2;
        world.updating = !opened;
        assert_eq!(world.reconcile().0, opened);
        world.now = due;
        world.reconcile();
        assert_eq!(world.writes, 2);
    }
}

/// The reconcile that the change triggers comes later.
#[test]
fn unrecorded_pod_version_restarts_nothing() {
    let mut world = updating_pod(&[true]);
    world.label = 1;
    let (pod, meta) = world.pod();
    world.state.prune(&pod, &meta, world.now);
    assert_eq!(
        super::plan(&pod, &meta, &world.state, true, world.now + KUBELET_RESYNC_DELAY),
        Plan::default()
    );
    assert_eq!(world.plan().requeue_at, Some(world.now + KUBELET_RESYNC_DELAY));
}

#[test]
fn container_being_replaced_is_left_to_kubelet() {
    let mut world = updating_pod(&[true]);
    (world.label, world.containers[0].image) = (1, 1);
    let due = KUBELET_REPLACE_DELAY + Duration::from_secs(5);
    assert_eq!(world.reconcile(), (false, Some(world.now + due)));
    world.now += due;
    assert_eq!(world.plan().restart.len(), 1);
}

/// The image was edited after the restart failed.
#[test]
fn retry_leaves_container_being_replaced_to_kubelet() {
    let mut world = updating_pod(&[true]);
    world.label = 1;
    world.reconcile();
    world.now += KUBELET_RESYNC_DELAY;
    world.state.begin_restart("rt://c-1");
    world
        .state
        .finish_restart("rt://c-1".to_owned(), false, world.now);
    world.containers[0].image = 1;
    let due = world.now + KUBELET_REPLACE_DELAY + Duration::from_secs(5);
    assert_eq!(world.reconcile(), (false, Some(due)));
    world.now = due;
    assert_eq!(world.plan().restart.len(), 1);
    // The next retry does not wait for kubelet a second time.
    world.state.begin_restart("rt://c-1");
    world.plan();
    world
        .state
        .finish_restart("rt://c-1".to_owned(), false, world.now);
    assert_eq!(world.plan().requeue_at, Some(world.now + Duration::from_secs(2)));
}

#[test]
fn failed_env_restart_is_retried_with_backoff() {
    let mut world = updating_pod(&[true]);
    world.label = 1;
    world.reconcile();
    world.now += KUBELET_RESYNC_DELAY;
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        assert_eq!(world.plan().restart.len(), 1);
        world.state.begin_restart("rt://c-1");
        assert_eq!(world.plan(), Plan::default(), "the restart is in progress");
        world
            .state
            .finish_restart("rt://c-1".to_owned(), false, world.now);
        let plan = world.plan();
        assert_eq!(
            (plan.restart.len(), plan.requeue_at),
            (0, Some(world.now + Duration::from_secs(pause)))
        );
        world.now += Duration::from_secs(pause);
    }
}

#[test]
fn unknown_env_hash_is_omitted_and_restarts_nothing() {
    let mut world = FakePod::new(&[true]);
    world.start_container(0);
    world.updating = true;
    world.state.pod_uid = "u".to_owned();
    world.state.facts.insert(
        "rt://c-1".to_owned(),
        ContainerFacts {
            plain_hash: 7,
            env_hash: None,
        },
    );
    world.label = 1;
    let plan = world.plan();
    assert_eq!((plan.inspect.len(), plan.restart.len()), (0, 0));
    let hashes = plan.write.unwrap().containers[0].hashes;
    assert_eq!(
        (hashes.plain_hash, hashes.extracted_env_from_metadata_hash),
        (7, 0)
    );
    // Without the feature gate the environment is not published, and what was published is kept.
    let (pod, meta) = updating_pod(&[true]).pod();
    assert_eq!(
        super::plan(&pod, &meta, &PodMetaState::default(), false, Duration::ZERO),
        Plan::default()
    );
}

#[test]
fn terminating_pod_gets_no_env_restart() {
    let mut world = updating_pod(&[true]);
    world.label = 1;
    let (mut pod, meta) = world.pod();
    pod.terminating = true;
    assert_eq!(
        super::plan(&pod, &meta, &world.state, true, world.now),
        Plan::default()
    );
}
