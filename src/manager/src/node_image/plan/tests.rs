#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::view::{ImageTag, TagRequest, TagStatusView};
use kruise_api::node_image::ImagePullPhase;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn timeouts() -> Timeouts {
    Timeouts::new(SignedDuration::from_secs(30))
}

fn node(ready: bool, since: i64) -> NodeView {
    NodeView {
        labels: [("zone".to_owned(), "a".to_owned())].into(),
        ready,
        ready_since: Some(at(since)),
        ..NodeView::default()
    }
}

fn tag(owner: Option<&str>, created: i64) -> TagView {
    let request = TagRequest {
        image: "nginx".into(),
        tag: "1".into(),
        owners: owner
            .map(|uid| TagOwner {
                uid: uid.to_owned(),
                job: None,
            })
            .into_iter()
            .collect(),
        ttl: Some(100),
        deadline: None,
        budget: 600,
    };
    TagView {
        request: Arc::new(request),
        version: 0,
        created: Some(at(created)),
    }
}

fn image(tags: Vec<TagView>, completed: Option<i64>) -> NodeImageView {
    let statuses = tags.iter().filter_map(|t| {
        completed.map(|c| TagStatusView {
            name: Arc::new(ImageTag {
                image: t.image.clone(),
                tag: t.tag.clone(),
            }),
            version: t.version,
            phase: ImagePullPhase::Succeeded,
            completed: Some(at(c)),
            started: None,
            error: None,
            progress_hash: 0,
            bytes: None,
        })
    });
    NodeImageView {
        labels: node(true, 0).labels,
        statuses: statuses.collect(),
        tags,
        ..NodeImageView::default()
    }
}

fn decide(node: Option<&NodeView>, image: Option<&NodeImageView>, owner_state: OwnerState, now: i64) -> Plan {
    let observed = NodeObservation {
        node,
        image,
        last_report: None,
    };
    plan(
        observed,
        |_| owner_state,
        |_| false,
        |_, _| None,
        timeouts(),
        at(now),
    )
}

#[test]
fn node_image_is_created_after_the_ready_delay() {
    let ready = node(true, 100);
    assert_eq!(
        decide(Some(&ready), None, OwnerState::Present, 129).requeue_at,
        Some(at(130))
    );
    let done = decide(Some(&ready), None, OwnerState::Present, 130);
    assert!(matches!(done.action, Some(Action::Create { .. })));
    let ahead = decide(Some(&node(true, 10_000)), None, OwnerState::Present, 130);
    assert!(
        matches!(ahead.action, Some(Action::Create { .. })),
        "the node's clock was ahead"
    );
    assert_eq!(
        decide(Some(&node(false, 0)), None, OwnerState::Present, 1000),
        Plan::default()
    );
}

#[test]
fn node_image_is_deleted_with_its_node_unless_fake() {
    let mut lone = image(vec![], None);
    assert_eq!(
        decide(None, Some(&lone), OwnerState::Present, 0).action,
        Some(Action::Delete)
    );
    lone.labels = [(kruise_api::keys::FAKE_NODE_IMAGE.to_owned(), "true".to_owned())].into();
    assert_eq!(decide(None, Some(&lone), OwnerState::Present, 0).action, None);
}

#[test]
fn virtual_nodes_are_ignored() {
    let mut virtual_node = node(true, 0);
    virtual_node
        .labels
        .insert("type".into(), "virtual-kubelet".into());
    assert_eq!(
        decide(Some(&virtual_node), None, OwnerState::Present, 1000),
        Plan::default()
    );
}

#[test]
fn labels_follow_the_node() {
    let mut other = image(vec![], None);
    other.labels = [("old".to_owned(), "x".to_owned())].into();
    let done = decide(Some(&node(true, 0)), Some(&other), OwnerState::Present, 0);
    let expected = [
        ("old".to_owned(), None),
        ("zone".to_owned(), Some("a".to_owned())),
    ];
    assert_eq!(done.action, Some(Action::SetLabels(expected.into())));
}

/// A webhook labels all objects, so that the labels are never those of the node.
#[test]
fn labels_that_cannot_be_set_keep_no_tag() {
    let mut done = image(vec![tag(Some("a"), 0)], Some(10));
    done.labels.insert("team".to_owned(), "x".to_owned());
    let decide = |now| decide(Some(&node(true, 0)), Some(&done), OwnerState::Present, now);
    let labels = Action::SetLabels([("team".to_owned(), None)].into());
    let early = Plan {
        action: Some(labels),
        requeue_at: Some(at(110)),
    };
    assert_eq!(decide(109), early);
    assert!(matches!(decide(110).action, Some(Action::RemoveEntries(_))));
}

#[test]
fn a_tag_expires_unless_a_running_job_counts_on_it() {
    let (ready, done) = (node(true, 0), image(vec![tag(Some("a"), 0)], Some(10)));
    let decide = |owner_state, now| decide(Some(&ready), Some(&done), owner_state, now);
    assert_eq!(decide(OwnerState::Present, 109), Plan::wait_until(Some(at(110))));
    assert!(matches!(
        decide(OwnerState::Present, 110).action,
        Some(Action::RemoveEntries(_))
    ));
    assert_eq!(decide(OwnerState::Counting, 100_000), Plan::default());
    assert!(matches!(
        decide(OwnerState::Deleted, 11).action,
        Some(Action::RemoveEntries(_))
    ));
}

#[test]
fn deleted_owner_is_removed_from_a_shared_tag() {
    let mut shared = tag(Some("a"), 0);
    Arc::make_mut(&mut shared.request).owners.push(TagOwner {
        uid: "b".to_owned(),
        job: None,
    });
    let (ready, image) = (node(true, 0), image(vec![shared], Some(10)));
    let observed = NodeObservation {
        node: Some(&ready),
        image: Some(&image),
        last_report: None,
    };
    let owner_state = |owner: &TagOwner| {
        if owner.uid == "a" {
            OwnerState::Deleted
        } else {
            OwnerState::Counting
        }
    };
    let expected = Removal {
        owners: vec![("nginx".into(), "1".into(), "a".into())],
        ..Removal::default()
    };
    assert_eq!(
        plan(observed, owner_state, |_| false, |_, _| None, timeouts(), at(20)).action,
        Some(Action::RemoveEntries(expected))
    );
}

#[test]
fn running_pull_survives_a_short_unready_period() {
    let unready = node(false, 2000);
    let mut started = image(vec![tag(Some("a"), 1000)], Some(0));
    started.statuses[0].completed = None;
    started.statuses[0].phase = ImagePullPhase::Pulling;
    Arc::make_mut(&mut started.tags[0].request).budget = 36_000;
    let decide = |last_report, now| {
        let observed = NodeObservation {
            node: Some(&unready),
            image: Some(&started),
            last_report: Some(at(last_report)),
        };
        plan(
            observed,
            |_| OwnerState::Counting,
            |_| false,
            |_, _| None,
            timeouts(),
            at(now),
        )
    };
    assert_eq!(
        decide(2010, 2100),
        Plan::wait_until(Some(at(2610))),
        "progress was written after kubelet's last word"
    );
    assert_eq!(
        decide(2500, 2700),
        Plan::wait_until(Some(at(3100))),
        "each word counts"
    );
    assert!(
        matches!(decide(2500, 3100).action, Some(Action::FailTags(failures)) if failures[0].message == NO_RESPONSE)
    );
}

#[test]
fn a_tag_without_owner_is_not_orphaned() {
    let (ready, done) = (node(true, 0), image(vec![tag(None, 0)], Some(10)));
    assert_eq!(
        decide(Some(&ready), Some(&done), OwnerState::Deleted, 20).action,
        None
    );
}

#[test]
fn unresponsive_daemon_fails_tags_sooner_if_unready() {
    let failed = |plan: Plan| match plan.action {
        Some(Action::FailTags(failures)) => Some(failures[0].message),
        _ => None,
    };
    let requested = image(vec![tag(Some("a"), 1000)], None);
    let alive = node(true, 0);
    assert_eq!(
        failed(decide(Some(&alive), Some(&requested), OwnerState::Counting, 1599)),
        None
    );
    assert_eq!(
        failed(decide(Some(&alive), Some(&requested), OwnerState::Counting, 1600)),
        Some(NO_RESPONSE)
    );
    let unready = node(false, 1010);
    assert_eq!(
        failed(decide(
            Some(&unready),
            Some(&requested),
            OwnerState::Counting,
            1069
        )),
        None
    );
    assert_eq!(
        failed(decide(
            Some(&unready),
            Some(&requested),
            OwnerState::Counting,
            1070
        )),
        Some(NO_RESPONSE)
    );
    // The daemon began and then died: its budget and ten minutes from the last status.
    let mut started = image(vec![tag(Some("a"), 1000)], Some(0));
    started.statuses[0].completed = None;
    started.statuses[0].phase = ImagePullPhase::Pulling;
    assert_eq!(
        failed(decide(Some(&alive), Some(&started), OwnerState::Counting, 2199)),
        None
    );
    assert_eq!(
        failed(decide(Some(&alive), Some(&started), OwnerState::Counting, 2200)),
        Some(NO_RESPONSE)
    );
}

/// Others may keep its result for longer.
#[test]
fn job_that_never_ends_pulls_again_whatever_the_ttl() {
    let (ready, mut done) = (node(true, 0), image(vec![tag(Some("never"), 0)], Some(10)));
    Arc::make_mut(&mut done.tags[0].request).ttl = Some(30 * 86_400);
    Arc::make_mut(&mut done.tags[0].request).owners.push(TagOwner {
        uid: "other".to_owned(),
        job: None,
    });
    let repull_at = |owner: &TagOwner, completed: Timestamp| {
        (owner.uid == "never").then(|| add(completed, SignedDuration::from_secs(50)))
    };
    let decide = |image: &NodeImageView, other, now| {
        let observed = NodeObservation {
            node: Some(&ready),
            image: Some(image),
            last_report: None,
        };
        let owner_state = |owner: &TagOwner| match owner.uid.as_str() {
            "never" => OwnerState::Present,
            _ => other,
        };
        plan(observed, owner_state, |_| false, repull_at, timeouts(), at(now))
    };
    let is_removed =
        |plan: Plan| matches!(plan.action, Some(Action::RemoveEntries(removal)) if removal.tags.len() == 1);
    assert_eq!(
        decide(&done, OwnerState::Present, 59),
        Plan::wait_until(Some(at(60)))
    );
    assert!(is_removed(decide(&done, OwnerState::Present, 60)));
    // The TTL is of an earlier schedule.
    Arc::make_mut(&mut done.tags[0].request).ttl = Some(20);
    assert_eq!(
        decide(&done, OwnerState::Present, 59),
        Plan::wait_until(Some(at(60)))
    );
    // A job that runs, or is paused, needs the tag; this one gives it up and requests it again.
    assert_eq!(
        decide(&done, OwnerState::Counting, 59),
        Plan::wait_until(Some(at(60)))
    );
    let removal = Removal {
        owners: vec![("nginx".to_owned(), "1".to_owned(), "never".to_owned())],
        ..Removal::default()
    };
    assert_eq!(
        decide(&done, OwnerState::Counting, 60).action,
        Some(Action::RemoveEntries(removal))
    );
    // The clock of the node is behind.
    done.tags[0].created = Some(at(1000));
    assert_eq!(
        decide(&done, OwnerState::Present, 1049),
        Plan::wait_until(Some(at(1050)))
    );
}

/// A tag of a namespace's job that pulls.
fn pulling(name: &str, namespace: &str, budget: i64) -> TagView {
    let job = Some(kruise_cluster::Key::namespaced(namespace, name));
    let mut pulling = tag(None, 0);
    let request = Arc::make_mut(&mut pulling.request);
    request.tag = name.to_owned();
    request.owners = vec![TagOwner {
        uid: name.to_owned(),
        job,
    }];
    request.budget = budget;
    pulling
}

/// When the tag `own` fails, if daemons report nothing.
fn time_of_failure(tags: Vec<TagView>, started: Option<i64>) -> i64 {
    let mut image = image(tags, Some(0));
    for status in &mut image.statuses {
        (status.phase, status.completed) = (ImagePullPhase::Pulling, None);
        status.started = started.map(at);
    }
    let ready = node(true, 0);
    let mut now = 0;
    loop {
        let plan = decide(Some(&ready), Some(&image), OwnerState::Counting, now);
        if let Some(Action::FailTags(failures)) = plan.action
            && failures.iter().any(|failure| failure.tag == "own")
        {
            return now;
        }
        now = plan.requeue_at.unwrap().as_second().max(now + 1);
    }
}

#[test]
fn limits_of_other_namespaces_do_not_delay_the_failure_of_a_dead_daemon() {
    let own = || pulling("own", "a", 1000);
    assert_eq!(time_of_failure(vec![own()], None), 1600);
    let with = |other| time_of_failure(vec![pulling("other", other, 5000), own()], None);
    assert_eq!(with("a"), 5600, "its tags may have to wait for each other");
    assert_eq!(with("b"), 1600);
    let endless = pulling("own", "a", i64::MAX);
    assert_eq!(time_of_failure(vec![endless], None), 86_400 + 600);
}

#[test]
fn deadline_of_a_tag_counts_from_its_first_attempt() {
    let mut own = pulling("own", "a", 10_000);
    Arc::make_mut(&mut own.request).deadline = Some(1800);
    assert_eq!(time_of_failure(vec![own.clone()], Some(3000)), 3000 + 1800 + 600);
    assert_eq!(time_of_failure(vec![own], None), 10_600, "it waits for a slot");
}

proptest! {
    /// A plan that waits has a requeue time and then an action: no tag is unfinished forever, and no finished tag stays
    /// forever once no job needs it.
    #[test]
    fn every_wait_ends_in_an_action(created in 0_i64..1000, completed in prop::option::of(1000_i64..2000),
                       begun in any::<bool>(), ready in any::<bool>(), deadline in prop::option::of(1_i64..900),
                       last_report in prop::option::of(0_i64..3000)) {
        let node = node(ready, 0);
        let mut requested = tag(Some("a"), created);
        Arc::make_mut(&mut requested.request).deadline = deadline;
        let mut image = image(vec![requested], completed.or(begun.then_some(0)));
        if completed.is_none() && begun {
            image.statuses[0].completed = None;
            image.statuses[0].phase = ImagePullPhase::Pulling;
        }
        let mut now = 3000;
        for _ in 0..20 {
            let observed = NodeObservation { node: Some(&node), image: Some(&image), last_report: last_report.map(at) };
            let plan = plan(observed, |_| OwnerState::Present, |_| false, |_, _| None, timeouts(), at(now));
            match (plan.action, plan.requeue_at) {
                (Some(_), _) => return Ok(()),
                (None, Some(wake)) => { prop_assert!(wake > at(now)); now = wake.as_second(); }
                (None, None) => prop_assert!(false, "no requeue time"),
            }
        }
        prop_assert!(false, "does not converge");
    }
}

/// Its time cannot be read, so that no TTL starts from it.
#[test]
fn outcome_without_time_expires_with_its_tag() {
    for phase in [ImagePullPhase::Succeeded, ImagePullPhase::Failed] {
        let mut view = image(vec![tag(Some("a"), 1000)], Some(0));
        view.statuses[0].completed = None;
        view.statuses[0].phase = phase;
        let late = decide(Some(&node(true, 0)), Some(&view), OwnerState::Counting, 1_000_000);
        assert_eq!(late, Plan::default());
        let waits = decide(Some(&node(true, 0)), Some(&view), OwnerState::Present, 1050);
        assert_eq!(
            waits,
            Plan {
                action: None,
                requeue_at: Some(at(1100))
            }
        );
        let image_without_node = decide(Some(&node(true, 0)), Some(&view), OwnerState::Present, 1100);
        assert!(
            matches!(image_without_node.action, Some(Action::RemoveEntries(removal)) if removal.tags.len() == 1)
        );
    }
}

/// A job has joined the tag between the plan and the write.
#[test]
fn tag_that_another_job_has_joined_is_kept() {
    let owner = |uid: &str| ObjectReference {
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    };
    let removal = TagRemoval {
        image: "nginx".into(),
        tag: "1".into(),
        version: 0,
        owners: vec!["a".into()],
    };
    let mut stored = ImageTagSpec {
        tag: "1".into(),
        owner_references: vec![owner("a")],
        ..ImageTagSpec::default()
    };
    assert!(removal.applies_to("nginx", &stored));
    assert!(!removal.applies_to("redis", &stored));
    stored.owner_references.push(owner("b"));
    assert!(!removal.applies_to("nginx", &stored));
}
