#![allow(clippy::unwrap_used)]
use std::cell::Cell;

use serde_json::json;

use super::*;
use kruise_api::keys;
use kruise_cluster::write_cache::Written;

fn orphan_view(name: &str, version: &str, app: &str) -> Arc<PodView> {
    let pod = Pod::from_json(&json!({ "metadata": {
        "name": name, "namespace": "n", "uid": name, "resourceVersion": version, "labels": { "app": app },
    } }));
    Arc::new(PodView {
        workload_pod: Some(Arc::new(pod)),
        ..PodView::default()
    })
}

fn clone_set(app: &str) -> Arc<CloneSet> {
    let set = json!({ "metadata": { "name": app, "namespace": "n", "uid": format!("set-{app}") }, "spec": {
        "selector": { "matchLabels": { "app": app } }, "template": {},
    } });
    Arc::new(serde_json::from_value(set).unwrap())
}

fn clone_set_view(app: &str) -> Arc<CloneSetView> {
    Arc::new(CloneSetView::from(&*clone_set(app)))
}

/// Names of the Pods that the index assigns to the CloneSet.
fn pods_of(index: &Index, app: &str) -> Vec<String> {
    let pods = index.owned_objects(&clone_set(app)).pods;
    pods.iter().map(|pod| pod.name.clone()).collect()
}

#[test]
fn orphans_are_indexed_by_the_selecting_clone_set() {
    let mut index = Index::default();
    let update_pod = |index: &mut Index, name: &str, old: Option<Arc<PodView>>, new: Option<Arc<PodView>>| {
        let key = Key::namespaced("n", name);
        index.apply(&WatchEvent::Pod(Change { key, old, new }))
    };
    let create_clone_set = |index: &mut Index, app: &str| {
        let (key, new) = (Key::namespaced("n", app), Some(clone_set_view(app)));
        index.apply(&WatchEvent::CloneSet(Change { key, old: None, new }));
    };
    let early = orphan_view("early", "1", "web");
    update_pod(&mut index, "early", None, Some(Arc::clone(&early)));
    create_clone_set(&mut index, "web");
    create_clone_set(&mut index, "db");
    let late = orphan_view("late", "2", "web");
    let affected = update_pod(&mut index, "late", None, Some(Arc::clone(&late)));
    assert_eq!(affected, BTreeSet::from([Key::namespaced("n", "web")]));
    for other in 0..100 {
        update_pod(
            &mut index,
            &format!("other-{other}"),
            None,
            Some(orphan_view("other", "3", "x")),
        );
    }
    assert_eq!(pods_of(&index, "web"), ["early", "late"]);
    assert_eq!(
        index.orphans["set-web"].len(),
        2,
        "objects of other CloneSets are not read"
    );
    // Another object controls it now, then the CloneSet again.
    update_pod(
        &mut index,
        "late",
        Some(late),
        Some(orphan_view("late", "4", "db")),
    );
    assert_eq!(pods_of(&index, "web"), ["early"]);
    assert_eq!(pods_of(&index, "db"), ["late"]);
    // One of our writes adopted it; no watch has shown that yet.
    let mut adopted = Pod::clone(early.workload_pod.as_ref().unwrap());
    adopted.controller = Some(Owner::clone_set(&clone_set("web").metadata));
    adopted.resource_version = "5".to_owned();
    let key = Key::namespaced("n", "early");
    let entry = versioned_pod(&key, Arc::new(adopted));
    let now = Instant::now();
    index.pods.apply_write(&key, entry, Written::Changed, now);
    assert_eq!(pods_of(&index, "web"), ["early"]);
    update_pod(&mut index, "late", Some(orphan_view("late", "4", "db")), None);
    assert_eq!(pods_of(&index, "db"), Vec::<String>::new());
    assert_eq!(index.orphans["set-db"].len(), 0);
    let (key, old) = (Key::namespaced("n", "db"), Some(clone_set_view("db")));
    index.apply(&WatchEvent::CloneSet(Change { key, old, new: None }));
    assert!(!index.orphans.contains_key("set-db"));
}

/// Selectors with many values, as the CRD allows them, are compiled at the watch.
#[test]
fn orphan_affects_the_clone_sets_that_do_not_exclude_it() {
    let excluding = |first: usize| {
        let values: Vec<String> = (first..first + 500).map(|at| format!("x{at}")).collect();
        let expression = json!({ "key": "app", "operator": "NotIn", "values": values });
        let name = format!("not-{first}");
        let set = json!({ "metadata": { "name": name, "namespace": "n", "uid": name }, "spec": {
            "selector": { "matchExpressions": [expression] }, "template": {},
        } });
        serde_json::from_value::<CloneSet>(set).unwrap()
    };
    let sets = [excluding(0), excluding(250)];
    let mut index = Index::default();
    index.apply(&pod_event("early", "x600"));
    for set in &sets {
        let (view, key) = (Arc::new(CloneSetView::from(set)), Key::from_object(set));
        let new = Some(view);
        index.apply(&WatchEvent::CloneSet(Change { key, old: None, new }));
    }
    let mut affected = |name: &str, app: &str| -> Vec<String> {
        let keys = index.apply(&pod_event(name, app));
        keys.into_iter().map(|key| key.name).collect()
    };
    assert_eq!(affected("first", "x100"), ["not-250"]);
    assert_eq!(affected("both", "x300"), Vec::<String>::new());
    assert_eq!(affected("second", "x700"), ["not-0"]);
    assert_eq!(affected("neither", "web"), ["not-0", "not-250"]);
    let pods = sets.map(|set| {
        let pods = index.owned_objects(&set).pods;
        pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>()
    });
    assert_eq!(pods[0], ["early", "neither", "second"]);
    assert_eq!(pods[1], ["first", "neither"]);
}

/// A new orphan.
fn pod_event(name: &str, app: &str) -> WatchEvent {
    WatchEvent::Pod(Change {
        key: Key::namespaced("n", name),
        old: None,
        new: Some(orphan_view(name, "1", app)),
    })
}

#[test]
fn ephemeral_claims_of_pods_are_not_reclaimed() {
    let mut index = Index::default();
    let pod = Pod::from_json(&json!({ "metadata": {
        "name": "s-abcde", "namespace": "n", "uid": "pod", "resourceVersion": "1",
        "labels": { (keys::CLONESET_INSTANCE_ID): "abcde" },
        "ownerReferences": [{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "s",
            "uid": "set", "controller": true }],
    } }));
    let key = Key::namespaced("n", "s-abcde");
    index.pods.apply_watch(&key, versioned_pod(&key, Arc::new(pod)));
    // The second claim is of an ephemeral volume.
    for (name, instance) in [("data-s-abcde", "abcde"), ("s-abcde-scratch", "")] {
        let (name, instance) = (name.to_owned(), instance.to_owned());
        let view = ClaimView {
            resource_version: "1".to_owned(),
            owner: Some(Owner::pod("s-abcde", "pod")),
            claim: Claim {
                name: name.clone(),
                instance_id: instance,
                ..Claim::default()
            },
        };
        let key = Key::namespaced("n", &name);
        index.claims.apply_watch(&key, versioned_claim(&key, &view));
    }
    let set = json!({ "metadata": { "name": "s", "namespace": "n", "uid": "set" }, "spec": {
        "selector": {}, "template": {}, "volumeClaimTemplates": [{ "metadata": { "name": "data" } }],
    } });
    let set: CloneSet = serde_json::from_value(set).unwrap();
    let owned_by_pod = index.owned_objects(&set).claims_owned_by_pod;
    let names = owned_by_pod["pod"].iter().map(|claim| claim.name.as_str());
    assert_eq!((owned_by_pod.len(), names.collect()), (1, vec!["data-s-abcde"]));
}

/// Watch events for the objects of CloneSet `set`: its Pod, its claim and its revision with that number, at version
/// `version`.
fn owned_objects_of(set: usize, at: usize, version: &str) -> [WatchEvent; 3] {
    let (name, owner) = (
        format!("{set}-{at}"),
        Owner::clone_set(&clone_set(&set.to_string()).metadata),
    );
    let key = Key::namespaced("n", &name);
    let pod = Pod::from_json(&json!({ "metadata": {
        "name": name, "namespace": "n", "uid": name, "resourceVersion": version,
        "labels": { "app": set.to_string() },
    } }));
    let pod = Pod {
        controller: Some(owner.clone()),
        ..pod
    };
    let pod = PodView {
        workload_pod: Some(Arc::new(pod)),
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
        WatchEvent::Pod(Change {
            key: key.clone(),
            old: Some(Arc::clone(&pod)),
            new: Some(pod),
        }),
        WatchEvent::Claim(Change {
            key: key.clone(),
            old: Some(Arc::clone(&claim)),
            new: Some(claim),
        }),
        WatchEvent::Revision(Change {
            key,
            old: Some(Arc::clone(&revision)),
            new: Some(revision),
        }),
    ]
}

/// Number of objects that are read for one change of each kind, if each of `sets` CloneSets owns `each` objects of it.
fn count_lookups(sets: usize, each: usize) -> usize {
    let mut index = Index::default();
    for set in (0..sets).map(|set| set.to_string()) {
        let (key, new) = (Key::namespaced("n", &set), Some(clone_set_view(&set)));
        index.apply(&WatchEvent::CloneSet(Change { key, old: None, new }));
    }
    for (set, at) in (0..sets).flat_map(|set| (0..each).map(move |at| (set, at))) {
        owned_objects_of(set, at, "1")
            .iter()
            .for_each(|said| drop(index.apply(said)));
    }
    let counters = |index: &Index| {
        [
            &index.pods.visited,
            &index.claims.visited,
            &index.revisions.visited,
            &index.jobs.visited,
            &index.sets.visited,
        ]
        .map(Cell::take)
    };
    counters(&index);
    let (set, key) = (clone_set("1"), Key::namespaced("n", "1"));
    let edit = Change {
        key: key.clone(),
        old: Some(clone_set_view("1")),
        new: Some(clone_set_view("1")),
    };
    for event in owned_objects_of(1, 0, "2")
        .into_iter()
        .chain([WatchEvent::CloneSet(edit)])
    {
        assert_eq!(index.apply(&event), BTreeSet::from([key.clone()]));
        let owned = index.owned_objects(&set);
        assert_eq!(
            (owned.pods.len(), owned.claims.len(), owned.revisions.len()),
            (each, each, each)
        );
        assert_eq!(
            index.next_fetch(&key, &clone_set_group(&set.metadata), Instant::now()),
            None
        );
    }
    counters(&index).iter().sum()
}

#[test]
fn lookup_cost_is_independent_of_other_clone_sets() {
    let alone = count_lookups(2, 10);
    assert_eq!(count_lookups(200, 10), alone);
    assert_eq!(count_lookups(2, 20), 2 * alone);
    // Once to read them, and once to check whether our writes are confirmed; Pods once more to find the claims that they
    // own.
    assert_eq!(
        alone,
        4 * (2 * 3 + 1) * 10,
        "four changes, ten objects of three kinds"
    );
}

/// The owner reference to the CloneSet `web` in namespace `n`, as the API server resolves it.
fn reference() -> serde_json::Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "set-web", "controller": true })
}

/// The numbers of Pods, claims, revisions and jobs that CloneSet `web` in `n` owns, if there is one of each with this
/// owner in this namespace.
fn count_owned(namespace: &str, owner: &serde_json::Value) -> [usize; 4] {
    let mut index = Index::default();
    let metadata = json!({ "name": "forged", "namespace": namespace, "uid": "forged", "resourceVersion": "1",
        "labels": { "app": "web", (keys::CLONESET_INSTANCE_ID): "abcde" }, "ownerReferences": [owner] });
    let object = json!({ "metadata": metadata, "revision": 0, "spec": {}, "data": {} });
    let key = Key::namespaced(namespace, "forged");
    let pod = PodView::from(&crate::view::RawPod::from(object.clone()));
    let change = Change {
        key: key.clone(),
        old: None,
        new: Some(Arc::new(pod)),
    };
    index.apply(&WatchEvent::Pod(change));
    let claim = ClaimView::from_object(&serde_json::from_value(object.clone()).unwrap());
    let change = Change {
        key: key.clone(),
        old: None,
        new: Some(Arc::new(claim)),
    };
    index.apply(&WatchEvent::Claim(change));
    if let Some(revision) = RevisionView::from_object(&serde_json::from_value(object).unwrap()) {
        let change = Change {
            key: key.clone(),
            old: None,
            new: Some(Arc::new(revision)),
        };
        index.apply(&WatchEvent::Revision(change));
    }
    let mut job = ImagePullJob::new("forged", Default::default());
    job.metadata = serde_json::from_value(metadata).unwrap();
    index.apply(&WatchEvent::Job(Change {
        key,
        old: None,
        new: Some(Arc::new(job)),
    }));
    let set = clone_set("web");
    let (key, new) = (Key::namespaced("n", "web"), Some(clone_set_view("web")));
    index.apply(&WatchEvent::CloneSet(Change { key, old: None, new }));
    let owned = index.owned_objects(&set);
    [
        owned.pods.len(),
        owned.claims.len(),
        owned.revisions.len(),
        owned.jobs.len(),
    ]
}

#[test]
fn forged_owner_references_own_nothing() {
    assert_eq!(count_owned("n", &reference()), [1, 1, 1, 1]);
    let mut older = reference();
    older["apiVersion"] = json!("apps.kruise.io/v1alpha1");
    assert_eq!(count_owned("n", &older), [1, 1, 1, 1]);
    for namespace in ["evil", ""] {
        assert_eq!(count_owned(namespace, &reference()), [0; 4], "{namespace}");
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
        assert_eq!(count_owned("n", &owner), [0; 4], "{field} {value}");
    }
}

#[tokio::test(start_paused = true)]
async fn panicking_watch_event_is_retried() {
    let stores = Stores {
        clone_sets: kruise_cluster::Store::from_objects([(
            Key::namespaced("n", "panic"),
            CloneSetView::from(&*clone_set("panic")),
        )]),
        ..Stores::empty()
    };
    let (mut events, mut index) = (watch_events(&stores), Index::default());
    let mut affected = BTreeSet::new();
    let panics = kruise_ops::panics::injected::inject_panic(NAME, "CloneSet n/panic");
    events.drain(|event| affected.extend(index.apply(event)));
    let again = events.next().await.unwrap();
    events.handle(again, |event| affected.extend(index.apply(event)));
    assert_eq!((panics.times(), affected.len()), (2, 0));
    drop(panics);
    let again = events.next().await.unwrap();
    events.handle(again, |event| affected.extend(index.apply(event)));
    assert_eq!(affected, BTreeSet::from([Key::namespaced("n", "panic")]));
}

#[test]
fn retried_watch_event_affects_its_clone_sets() {
    let (mut events, mut index) = (watch_events(&Stores::empty()), Index::default());
    let mut affected = BTreeSet::new();
    let (web, new) = (Key::namespaced("n", "web"), Some(clone_set_view("web")));
    index.apply(&WatchEvent::CloneSet(Change {
        key: web.clone(),
        old: None,
        new,
    }));
    let labelled = |app: &str| {
        let (key, new) = (
            Key::namespaced("n", "moved"),
            Some(orphan_view("moved", "1", app)),
        );
        WatchEvent::Pod(Change { key, old: None, new })
    };
    let panics = kruise_ops::panics::injected::inject_panic(NAME, "Pod n/moved");
    events.handle(labelled("web"), |event| affected.extend(index.apply(event)));
    assert!(affected.is_empty());
    drop(panics);
    events.handle(labelled("other"), |event| affected.extend(index.apply(event)));
    assert_eq!(affected, BTreeSet::from([web]));
}
