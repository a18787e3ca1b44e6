#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use crate::view::TagStatusView;
use kruise_api::node_image::ImagePullPhase;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn rules() -> Rules {
    Rules::new(SignedDuration::from_secs(30))
}

fn node(ready: bool, since: i64) -> NodeView {
    NodeView {
        labels: [("zone".to_owned(), "a".to_owned())].into(),
        ready,
        ready_since: Some(at(since)),
        deleting: false,
    }
}

fn tag(owner: Option<&str>, created: i64) -> TagView {
    TagView {
        image: "nginx".into(),
        tag: "1".into(),
        created: Some(at(created)),
        owners: owner
            .map(|uid| Owner {
                uid: uid.to_owned(),
                job: None,
            })
            .into_iter()
            .collect(),
        ttl: Some(100),
        budget: 600,
        ..TagView::default()
    }
}

fn image(tags: Vec<TagView>, completed: Option<i64>) -> NodeImageView {
    let statuses = tags.iter().filter_map(|t| {
        completed.map(|c| TagStatusView {
            image: t.image.clone(),
            tag: t.tag.clone(),
            version: t.version,
            phase: ImagePullPhase::Succeeded,
            completed: Some(at(c)),
            error: None,
            pulse: 0,
        })
    });
    NodeImageView {
        labels: node(true, 0).labels,
        statuses: statuses.collect(),
        tags,
        ..NodeImageView::default()
    }
}

fn decide(node: Option<&NodeView>, image: Option<&NodeImageView>, interest: Interest, now: i64) -> Plan {
    let seen = Observed {
        node,
        image,
        heard: None,
    };
    plan(seen, |_| interest, |_| false, rules(), at(now))
}

#[test]
fn a_nodeimage_is_made_once_its_node_was_ready_for_the_delay() {
    let ready = node(true, 100);
    assert_eq!(
        decide(Some(&ready), None, Interest::There, 129).wake,
        Some(at(130))
    );
    let done = decide(Some(&ready), None, Interest::There, 130);
    assert!(matches!(done.act, Some(Act::Create { .. })));
    assert_eq!(
        decide(Some(&node(false, 0)), None, Interest::There, 1000),
        Plan::default()
    );
}

#[test]
fn a_nodeimage_goes_with_its_node_unless_it_is_for_tests() {
    let mut lone = image(vec![], None);
    assert_eq!(
        decide(None, Some(&lone), Interest::There, 0).act,
        Some(Act::Delete)
    );
    lone.labels = [(kruise_api::keys::FAKE_NODE_IMAGE.to_owned(), "true".to_owned())].into();
    assert_eq!(decide(None, Some(&lone), Interest::There, 0).act, None);
}

#[test]
fn virtual_nodes_are_left_alone() {
    let mut virtual_node = node(true, 0);
    virtual_node
        .labels
        .insert("type".into(), "virtual-kubelet".into());
    assert_eq!(
        decide(Some(&virtual_node), None, Interest::There, 1000),
        Plan::default()
    );
}

#[test]
fn labels_follow_the_node() {
    let mut other = image(vec![], None);
    other.labels = [("old".to_owned(), "x".to_owned())].into();
    let done = decide(Some(&node(true, 0)), Some(&other), Interest::There, 0);
    let want = [
        ("old".to_owned(), None),
        ("zone".to_owned(), Some("a".to_owned())),
    ];
    assert_eq!(done.act, Some(Act::Label(want.into())));
}

#[test]
fn a_tag_expires_unless_a_running_job_counts_on_it() {
    let (ready, done) = (node(true, 0), image(vec![tag(Some("a"), 0)], Some(10)));
    let decide = |interest, now| decide(Some(&ready), Some(&done), interest, now);
    assert_eq!(decide(Interest::There, 109), Plan::wait(Some(at(110))));
    assert!(matches!(decide(Interest::There, 110).act, Some(Act::Remove(_))));
    assert_eq!(decide(Interest::Counting, 100_000), Plan::default());
    assert!(matches!(decide(Interest::Gone, 11).act, Some(Act::Remove(_))));
}

#[test]
fn an_owner_that_has_gone_is_struck_off_while_others_have_not() {
    let mut shared = tag(Some("a"), 0);
    shared.owners.push(Owner {
        uid: "b".to_owned(),
        job: None,
    });
    let (ready, image) = (node(true, 0), image(vec![shared], Some(10)));
    let seen = Observed {
        node: Some(&ready),
        image: Some(&image),
        heard: None,
    };
    let interest = |owner: &Owner| {
        if owner.uid == "a" {
            Interest::Gone
        } else {
            Interest::Counting
        }
    };
    let want = Removal {
        owners: vec![("nginx".into(), "1".into(), "a".into())],
        ..Removal::default()
    };
    assert_eq!(
        plan(seen, interest, |_| false, rules(), at(20)).act,
        Some(Act::Remove(want))
    );
}

#[test]
fn a_pull_under_way_outlives_a_minute_of_a_node_that_is_not_ready() {
    let ill = node(false, 2000);
    let mut begun = image(vec![tag(Some("a"), 1000)], Some(0));
    begun.statuses[0].completed = None;
    begun.statuses[0].phase = ImagePullPhase::Pulling;
    begun.tags[0].budget = 36_000;
    let decide = |heard, now| {
        let seen = Observed {
            node: Some(&ill),
            image: Some(&begun),
            heard: Some(at(heard)),
        };
        plan(seen, |_| Interest::Counting, |_| false, rules(), at(now))
    };
    assert_eq!(
        decide(2010, 2100),
        Plan::wait(Some(at(2610))),
        "progress was written after kubelet's last word"
    );
    assert_eq!(decide(2500, 2700), Plan::wait(Some(at(3100))), "each word counts");
    assert!(
        matches!(decide(2500, 3100).act, Some(Act::Fail(failures)) if failures[0].message == NO_RESPONSE)
    );
}

#[test]
fn a_tag_without_owner_is_not_orphaned() {
    let (ready, done) = (node(true, 0), image(vec![tag(None, 0)], Some(10)));
    assert_eq!(decide(Some(&ready), Some(&done), Interest::Gone, 20).act, None);
}

#[test]
fn a_silent_daemon_is_given_up_by_time_and_sooner_on_a_dead_node() {
    let failed = |plan: Plan| match plan.act {
        Some(Act::Fail(failures)) => Some(failures[0].message),
        _ => None,
    };
    let asked = image(vec![tag(Some("a"), 1000)], None);
    let alive = node(true, 0);
    assert_eq!(
        failed(decide(Some(&alive), Some(&asked), Interest::Counting, 1599)),
        None
    );
    assert_eq!(
        failed(decide(Some(&alive), Some(&asked), Interest::Counting, 1600)),
        Some(NO_RESPONSE)
    );
    let dead = node(false, 1010);
    assert_eq!(
        failed(decide(Some(&dead), Some(&asked), Interest::Counting, 1069)),
        None
    );
    assert_eq!(
        failed(decide(Some(&dead), Some(&asked), Interest::Counting, 1070)),
        Some(NO_RESPONSE)
    );
    // It began, and then died: its budget and ten minutes from the last word.
    let mut begun = image(vec![tag(Some("a"), 1000)], Some(0));
    begun.statuses[0].completed = None;
    begun.statuses[0].phase = ImagePullPhase::Pulling;
    assert_eq!(
        failed(decide(Some(&alive), Some(&begun), Interest::Counting, 2199)),
        None
    );
    assert_eq!(
        failed(decide(Some(&alive), Some(&begun), Interest::Counting, 2200)),
        Some(NO_RESPONSE)
    );
}

proptest! {
    /// A plan that waits says until when, and then something is done: no tag is unfinished for ever, and no
    /// finished one stays for ever once nobody counts on it.
    #[test]
    fn every_wait_ends(created in 0_i64..1000, completed in prop::option::of(1000_i64..2000),
                       begun in any::<bool>(), ready in any::<bool>(), deadline in prop::option::of(1_i64..900),
                       heard in prop::option::of(0_i64..3000)) {
        let node = node(ready, 0);
        let mut asked = tag(Some("a"), created);
        asked.deadline = deadline;
        let mut image = image(vec![asked], completed.or(begun.then_some(0)));
        if completed.is_none() && begun {
            image.statuses[0].completed = None;
            image.statuses[0].phase = ImagePullPhase::Pulling;
        }
        let mut now = 3000;
        for _ in 0..20 {
            let seen = Observed { node: Some(&node), image: Some(&image), heard: heard.map(at) };
            let plan = plan(seen, |_| Interest::There, |_| false, rules(), at(now));
            match (plan.act, plan.wake) {
                (Some(_), _) => return Ok(()),
                (None, Some(wake)) => { prop_assert!(wake > at(now)); now = wake.as_second(); }
                (None, None) => prop_assert!(false, "waits for nothing"),
            }
        }
        prop_assert!(false, "never ends");
    }
}

/// Its time cannot be read, so that nothing counts from it.
#[test]
fn an_outcome_without_a_time_is_not_given_up_and_goes_with_its_tag() {
    for phase in [ImagePullPhase::Succeeded, ImagePullPhase::Failed] {
        let mut view = image(vec![tag(Some("a"), 1000)], Some(0));
        view.statuses[0].completed = None;
        view.statuses[0].phase = phase;
        let late = decide(Some(&node(true, 0)), Some(&view), Interest::Counting, 1_000_000);
        assert_eq!(late, Plan::default());
        let waits = decide(Some(&node(true, 0)), Some(&view), Interest::There, 1050);
        assert_eq!(
            waits,
            Plan {
                act: None,
                wake: Some(at(1100))
            }
        );
        let gone = decide(Some(&node(true, 0)), Some(&view), Interest::There, 1100);
        assert!(matches!(gone.act, Some(Act::Remove(removal)) if removal.tags.len() == 1));
    }
}
