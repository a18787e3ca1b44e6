#![allow(clippy::unwrap_used)]
use std::cell::Cell;

use serde_json::json;

use super::*;

fn stray(name: &str, version: &str, app: &str) -> Arc<PodView> {
    let pod = Pod::of(&json!({ "metadata": {
        "name": name, "namespace": "n", "uid": name, "resourceVersion": version, "labels": { "app": app },
    } }));
    Arc::new(PodView {
        workload: Some(Arc::new(pod)),
        ..PodView::default()
    })
}

fn set_of(app: &str) -> Arc<CloneSet> {
    let set = json!({ "metadata": { "name": app, "namespace": "n", "uid": format!("set-{app}") }, "spec": {
        "selector": { "matchLabels": { "app": app } }, "template": {},
    } });
    Arc::new(serde_json::from_value(set).unwrap())
}

fn view_of(app: &str) -> Arc<CloneSetView> {
    Arc::new(CloneSetView::from(&*set_of(app)))
}

/// Names of the Pods that belong to the CloneSet, after it was told so much.
fn pods_of(index: &Index, app: &str) -> Vec<String> {
    let pods = index.belongings(&set_of(app)).pods;
    pods.iter().map(|pod| pod.name.clone()).collect()
}

#[test]
fn pods_of_nobody_are_looked_at_by_those_who_select_them() {
    let mut index = Index::default();
    let told = |index: &mut Index, name: &str, old: Option<Arc<PodView>>, new: Option<Arc<PodView>>| {
        let key = Key::namespaced("n", name);
        index.apply(&Said::Pod(Change { key, old, new }))
    };
    let made = |index: &mut Index, app: &str| {
        let (key, new) = (Key::namespaced("n", app), Some(view_of(app)));
        index.apply(&Said::Set(Change { key, old: None, new }));
    };
    let early = stray("early", "1", "web");
    told(&mut index, "early", None, Some(Arc::clone(&early)));
    made(&mut index, "web");
    made(&mut index, "db");
    let late = stray("late", "2", "web");
    let woken = told(&mut index, "late", None, Some(Arc::clone(&late)));
    assert_eq!(woken, BTreeSet::from([Key::namespaced("n", "web")]));
    for other in 0..100 {
        told(
            &mut index,
            &format!("other-{other}"),
            None,
            Some(stray("other", "3", "x")),
        );
    }
    assert_eq!(pods_of(&index, "web"), ["early", "late"]);
    assert_eq!(
        index.strays["set-web"].len(),
        2,
        "what others have is not looked at"
    );
    // It is another's now, and back again.
    told(&mut index, "late", Some(late), Some(stray("late", "4", "db")));
    assert_eq!(pods_of(&index, "web"), ["early"]);
    assert_eq!(pods_of(&index, "db"), ["late"]);
    // A write of ours adopted it, which no watch has told yet.
    let mut adopted = Pod::clone(early.workload.as_ref().unwrap());
    adopted.controller = Some(Owner::clone_set(&set_of("web").metadata));
    adopted.resource_version = "5".to_owned();
    let key = Key::namespaced("n", "early");
    let at = pod_at(&key, Arc::new(adopted));
    index.pods.wrote(&key, at, Instant::now());
    assert_eq!(pods_of(&index, "web"), ["early"]);
    told(&mut index, "late", Some(stray("late", "4", "db")), None);
    assert_eq!(pods_of(&index, "db"), Vec::<String>::new());
    assert_eq!(index.strays["set-db"].len(), 0);
    let (key, old) = (Key::namespaced("n", "db"), Some(view_of("db")));
    index.apply(&Said::Set(Change { key, old, new: None }));
    assert!(!index.strays.contains_key("set-db"));
}

#[test]
fn claims_that_were_a_pod_s_own_from_the_beginning_are_not_ours_to_take_back() {
    let mut index = Index::default();
    let pod = Pod::of(&json!({ "metadata": {
        "name": "s-abcde", "namespace": "n", "uid": "pod", "resourceVersion": "1",
        "labels": { (keys::CLONESET_INSTANCE_ID): "abcde" },
        "ownerReferences": [{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "s",
            "uid": "set", "controller": true }],
    } }));
    let key = Key::namespaced("n", "s-abcde");
    index.pods.watched(&key, pod_at(&key, Arc::new(pod)));
    // The second is of an ephemeral volume.
    for (name, instance) in [("data-s-abcde", "abcde"), ("s-abcde-scratch", "")] {
        let (name, instance) = (name.to_owned(), instance.to_owned());
        let view = ClaimView {
            resource_version: "1".to_owned(),
            owner: Some(Owner::pod("s-abcde", "pod")),
            claim: Claim {
                name: name.clone(),
                instance,
                ..Claim::default()
            },
        };
        let key = Key::namespaced("n", &name);
        index.claims.watched(&key, claim_at(&key, &view));
    }
    let set = json!({ "metadata": { "name": "s", "namespace": "n", "uid": "set" }, "spec": {
        "selector": {}, "template": {}, "volumeClaimTemplates": [{ "metadata": { "name": "data" } }],
    } });
    let set: CloneSet = serde_json::from_value(set).unwrap();
    let given = index.belongings(&set).given;
    let names = given["pod"].iter().map(|claim| claim.name.as_str());
    assert_eq!((given.len(), names.collect()), (1, vec!["data-s-abcde"]));
}

/// The objects of CloneSet `set`: its Pod, its claim and its revision of that number, at version `version`.
fn theirs(set: usize, at: usize, version: &str) -> [Said; 3] {
    let (name, owner) = (
        format!("{set}-{at}"),
        Owner::clone_set(&set_of(&set.to_string()).metadata),
    );
    let key = Key::namespaced("n", &name);
    let pod = Pod::of(&json!({ "metadata": {
        "name": name, "namespace": "n", "uid": name, "resourceVersion": version,
        "labels": { "app": set.to_string() },
    } }));
    let pod = Pod {
        controller: Some(owner.clone()),
        ..pod
    };
    let pod = PodView {
        workload: Some(Arc::new(pod)),
        ..PodView::default()
    };
    let claim = ClaimView {
        resource_version: version.to_owned(),
        owner: Some(owner.clone()),
        claim: Claim::default(),
    };
    let revision = RevisionView {
        resource_version: version.to_owned(),
        controller: Some(owner),
        ..RevisionView::default()
    };
    let (pod, claim, revision) = (Arc::new(pod), Arc::new(claim), Arc::new(revision));
    [
        Said::Pod(Change {
            key: key.clone(),
            old: Some(Arc::clone(&pod)),
            new: Some(pod),
        }),
        Said::Claim(Change {
            key: key.clone(),
            old: Some(Arc::clone(&claim)),
            new: Some(claim),
        }),
        Said::Revision(Change {
            key,
            old: Some(Arc::clone(&revision)),
            new: Some(revision),
        }),
    ]
}

/// How many objects are looked at for one change of each kind that one of so many CloneSets owns so many of.
fn looks(sets: usize, each: usize) -> usize {
    let mut index = Index::default();
    for set in (0..sets).map(|set| set.to_string()) {
        let (key, new) = (Key::namespaced("n", &set), Some(view_of(&set)));
        index.apply(&Said::Set(Change { key, old: None, new }));
    }
    for (set, at) in (0..sets).flat_map(|set| (0..each).map(move |at| (set, at))) {
        theirs(set, at, "1")
            .iter()
            .for_each(|said| drop(index.apply(said)));
    }
    let counters = |index: &Index| {
        [
            &index.pods.looks,
            &index.claims.looks,
            &index.revisions.looks,
            &index.jobs.looks,
            &index.sets.looks,
        ]
        .map(Cell::take)
    };
    counters(&index);
    let (set, one) = (set_of("1"), Key::namespaced("n", "1"));
    let edit = Change {
        key: one.clone(),
        old: Some(view_of("1")),
        new: Some(view_of("1")),
    };
    for said in theirs(1, 0, "2").into_iter().chain([Said::Set(edit)]) {
        assert_eq!(index.apply(&said), BTreeSet::from([one.clone()]));
        let seen = index.belongings(&set);
        assert_eq!(
            (seen.pods.len(), seen.claims.len(), seen.revisions.len()),
            (each, each, each)
        );
        assert_eq!(
            index.next_look_up(&one, &group_of(&set.metadata), Instant::now()),
            None
        );
    }
    counters(&index).iter().sum()
}

#[test]
fn a_change_costs_what_its_cloneset_has_however_many_others_there_are() {
    let alone = looks(2, 10);
    assert_eq!(looks(200, 10), alone);
    assert_eq!(looks(2, 20), 2 * alone);
    // Once to see them, and once to see whether writes of ours are confirmed.
    assert_eq!(alone, 4 * 2 * 3 * 10, "four changes, ten objects of three kinds");
}

/// A reference to the CloneSet `web` in namespace `n`, as the API server resolves it.
fn reference() -> serde_json::Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "set-web", "controller": true })
}

/// The names that a CloneSet `web` in `n` takes for its own, of Pods, claims, revisions and jobs, where there is one of each
/// with this owner in this namespace.
fn taken_in(namespace: &str, owner: &serde_json::Value) -> [usize; 4] {
    let mut index = Index::default();
    let metadata = json!({ "name": "forged", "namespace": namespace, "uid": "forged", "resourceVersion": "1",
        "labels": { "app": "web", (keys::CLONESET_INSTANCE_ID): "abcde" }, "ownerReferences": [owner] });
    let object = json!({ "metadata": metadata, "revision": 0, "spec": {}, "data": {} });
    let key = Key::namespaced(namespace, "forged");
    let pod = PodView::from(&crate::view::RawPod::from(object.clone()));
    let said = Change {
        key: key.clone(),
        old: None,
        new: Some(Arc::new(pod)),
    };
    index.apply(&Said::Pod(said));
    let claim = ClaimView::of(&serde_json::from_value(object.clone()).unwrap());
    let said = Change {
        key: key.clone(),
        old: None,
        new: Some(Arc::new(claim)),
    };
    index.apply(&Said::Claim(said));
    if let Some(revision) = RevisionView::of(&serde_json::from_value(object).unwrap()) {
        let said = Change {
            key: key.clone(),
            old: None,
            new: Some(Arc::new(revision)),
        };
        index.apply(&Said::Revision(said));
    }
    let mut job = ImagePullJob::new("forged", Default::default());
    job.metadata = serde_json::from_value(metadata).unwrap();
    index.apply(&Said::Job(Change {
        key,
        old: None,
        new: Some(Arc::new(job)),
    }));
    let set = set_of("web");
    let (key, new) = (Key::namespaced("n", "web"), Some(view_of("web")));
    index.apply(&Said::Set(Change { key, old: None, new }));
    let of = index.belongings(&set);
    [of.pods.len(), of.claims.len(), of.revisions.len(), of.jobs.len()]
}

#[test]
fn what_names_the_uid_is_not_the_cloneset_s_in_another_namespace_or_by_another_name_or_version() {
    assert_eq!(taken_in("n", &reference()), [1, 1, 1, 1]);
    let mut older = reference();
    older["apiVersion"] = json!("apps.kruise.io/v1alpha1");
    assert_eq!(taken_in("n", &older), [1, 1, 1, 1]);
    for namespace in ["evil", ""] {
        assert_eq!(taken_in(namespace, &reference()), [0; 4], "{namespace}");
    }
    let forged = [
        ("apiVersion", "apps.kruise.io/v9"),
        ("apiVersion", "example.com/v1beta1"),
        ("apiVersion", ""),
        ("kind", "Deployment"),
        ("kind", "Pod"),
        ("name", "db"),
        ("uid", "set-db"),
    ];
    for (field, value) in forged {
        let mut owner = reference();
        owner[field] = json!(value);
        assert_eq!(taken_in("n", &owner), [0; 4], "{field} {value}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_panics_when_it_is_taken_in_is_taken_in_again() {
    let stores = Stores {
        clone_sets: kruise_cluster::Mirror::of([(
            Key::namespaced("n", "panic"),
            CloneSetView::from(&*set_of("panic")),
        )]),
        ..Stores::empty()
    };
    let (mut changes, mut index) = (Changes::new(&stores), Index::default());
    let panics = kruise_ops::panics::injected::panic_at(crate::cloneset::NAME, "CloneSet n/panic");
    assert!(changes.drain(&mut index).is_empty());
    let again = changes.next().await.unwrap();
    assert!(changes.apply(&mut index, again).is_empty());
    assert_eq!(panics.times(), 2);
    drop(panics);
    let again = changes.next().await.unwrap();
    let concerned = changes.apply(&mut index, again);
    assert_eq!(concerned, BTreeSet::from([Key::namespaced("n", "panic")]));
}

#[test]
fn what_panicked_before_concerns_its_clonesets_all_the_same() {
    let (mut changes, mut index) = (Changes::new(&Stores::empty()), Index::default());
    let (web, new) = (Key::namespaced("n", "web"), Some(view_of("web")));
    index.apply(&Said::Set(Change {
        key: web.clone(),
        old: None,
        new,
    }));
    let labelled = |app: &str| {
        let (key, new) = (Key::namespaced("n", "moved"), Some(stray("moved", "1", app)));
        Said::Pod(Change { key, old: None, new })
    };
    let panics = kruise_ops::panics::injected::panic_at(crate::cloneset::NAME, "Pod n/moved");
    assert!(changes.apply(&mut index, labelled("web")).is_empty());
    drop(panics);
    let concerned = changes.apply(&mut index, labelled("other"));
    assert_eq!(concerned, BTreeSet::from([web]));
}
