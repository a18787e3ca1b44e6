//! Requests and answers that are lost between the manager and the API server, and news that is late.

use std::collections::BTreeMap;

use kruise_api::cloneset::CloneSet;
use kube::api::{DynamicObject, Patch};
use kube::runtime::watcher;
use serde_json::{Value, json};
use testbed::cluster::Options;
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::field::{Field, identities};
use crate::manager::Manager;
use crate::pods::{self, label};
use crate::proxy::{Loss, Proxy};
use crate::waits;
use crate::world::World;

/// A manager behind a proxy, with Kubernetes' own garbage collection.
pub struct Bed {
    pub world: &'static World,
    pub proxy: Proxy,
    pub manager: Manager,
}

static BED: OnceCell<RwLock<Bed>> = OnceCell::const_new();

async fn bed() -> &'static RwLock<Bed> {
    let start = || {
        let options = Options {
            controllers: true,
            only: "garbage-collector-controller,persistentvolumeclaim-protection-controller",
            ..Options::default()
        };
        let world: &'static World = Box::leak(Box::new(World::with(options)));
        let mut manager = Manager::somewhere(&world.plane, "kruise-manager");
        let proxy = Proxy::before(&manager.kubeconfig);
        manager.start().unwrap();
        manager.until_it_says("leading");
        RwLock::new(Bed {
            world,
            proxy,
            manager,
        })
    };
    BED.get_or_init(|| async { tokio::task::spawn_blocking(start).await.unwrap() })
        .await
}

/// A test whose losses concern its own namespace alone; such tests run side by side.
pub async fn shared() -> RwLockReadGuard<'static, Bed> {
    bed().await.read().await
}

/// A test that stops everything for everybody.
pub async fn alone() -> RwLockWriteGuard<'static, Bed> {
    bed().await.write().await
}

/// What a CloneSet's work consists of, and what its Pods are looked up with.
const WORK: [&str; 10] = [
    "create pods",
    "delete pods",
    "patch pods",
    "patch pods/status",
    "create persistentvolumeclaims",
    "patch persistentvolumeclaims",
    "delete persistentvolumeclaims",
    "create controllerrevisions",
    "patch clonesets/status",
    "get pods",
];

/// There is no end of losses.
const ALWAYS: usize = usize::MAX;

/// So many Pods there are at first.
const PODS: usize = 6;

/// `web` of six Pods with a claim each, updated in place, one at a time.
pub fn spec(reuse: bool) -> Value {
    json!({
        "replicas": PODS,
        "scaleStrategy": { "enablePVCReuse": reuse },
        "updateStrategy": { "rollingUpdate": { "maxUnavailable": 1 } },
        "volumeClaimTemplates": [{
            "metadata": { "name": "data" },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
        }],
    })
}

/// Waits until every Pod of `web` has its claim and nobody else has one; UIDs of the claims by the Pods' names.
pub async fn matched(field: &Field) -> BTreeMap<String, String> {
    let set = field.sets().get("web").await.unwrap();
    let pods = field.pods_of("web").await;
    let names: Vec<String> = pods.iter().map(pods::name).collect();
    for pod in &pods {
        let id = label(pod, "apps.kruise.io/cloneset-instance-id");
        assert_eq!(pods::name(pod), format!("web-{id}"));
        let claim = &pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"];
        assert_eq!(*claim, json!(format!("data-web-{id}")));
    }
    let claims = field.api("", "v1", "PersistentVolumeClaim");
    let wanted: Vec<String> = names.iter().map(|name| format!("data-{name}")).collect();
    let uid = json!(set.metadata.uid);
    let stays = |claim: &&Value| {
        let owners = claim["metadata"]["ownerReferences"].as_array().unwrap();
        owners.len() == 1 && owners[0]["uid"] == uid && !pods::deleting(claim)
    };
    let exactly = |claims: &[&Value]| {
        claims
            .iter()
            .map(|claim| pods::name(claim))
            .eq(wanted.iter().cloned())
            && claims.iter().all(stays)
    };
    let logs = || waits::tails([field.world.plane.dir().join("kruise-manager.log")]);
    let read = |one: DynamicObject| json!(one);
    let what = format!("the claims {wanted:?} and no others");
    let claims = waits::follow(&what, &logs, claims, watcher::Config::default(), read, exactly).await;
    for (claim, pod) in claims.iter().zip(&pods) {
        let id = label(pod, "apps.kruise.io/cloneset-instance-id");
        assert_eq!(label(claim, "apps.kruise.io/cloneset-instance-id"), id);
    }
    names.into_iter().zip(claims.iter().map(pods::uid)).collect()
}

/// How often the API server was asked by the manager for a new Pod, whatever became of it.
fn creations(field: &Field) -> usize {
    let all = field.world.plane.writes().unwrap();
    let ours = all.iter().filter(|w| {
        w["verb"] == "create"
            && w["objectRef"]["resource"] == "pods"
            && w["objectRef"]["subresource"].is_null()
            && w["objectRef"]["namespace"] == field.namespace.as_str()
            && w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
    });
    ours.count()
}

/// Made with a claim each.
async fn made(field: &Field, reuse: bool) {
    let witness = field.witness("web").await;
    field.set("web", spec(reuse)).await;
    field.settled("web").await;
    assert!(witness.seen().most <= PODS, "{:?}", witness.seen());
    matched(field).await;
}

/// Updated where they are, one at a time.
async fn updated_in_place(field: &Field) {
    let (pods, claims) = (field.pods_of("web").await, matched(field).await);
    let witness = field.witness("web").await;
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    assert_eq!(identities(&field.pods_of("web").await), identities(&pods));
    assert_eq!(matched(field).await, claims);
    let seen = witness.seen();
    assert!(seen.most == PODS && seen.least_serving >= PODS - 1, "{seen:?}");
}

/// Asks for another Pod in the place of one.
pub async fn unwanted(field: &Field, pod: &str) {
    let mark = json!({ "metadata": { "labels": { "apps.kruise.io/specified-delete": "true" } } });
    let mark = Patch::Merge(mark);
    field.pods().patch(pod, &Default::default(), &mark).await.unwrap();
}

/// Waits for another Pod in the place of one, with a claim of its own.
pub async fn until_replaced(field: &Field, gone: &str, before: &BTreeMap<String, String>) {
    let another = |pods: &[&Value]| {
        pods.len() == before.len()
            && pods
                .iter()
                .all(|pod| pods::name(pod) != gone && pods::serves(pod))
    };
    field.until_pods("web", "another in its place", another).await;
    let after = matched(field).await;
    let kept = after
        .iter()
        .filter(|(name, claim)| before.get(*name) == Some(claim));
    assert_eq!(kept.count(), before.len() - 1, "{before:?} {after:?}");
    assert!(
        after.values().all(|claim| *claim != before[gone]),
        "{before:?} {after:?}"
    );
}

/// Somebody asks for another in the place of one.
async fn one_replaced(field: &Field) {
    let before = matched(field).await;
    let witness = field.witness("web").await;
    let gone = before.keys().next().unwrap();
    unwanted(field, gone).await;
    until_replaced(field, gone, &before).await;
    let seen = witness.seen();
    assert!(seen.most == PODS && seen.least_serving >= PODS - 1, "{seen:?}");
}

/// Replaced by others, none of which goes before there is another.
async fn replaced(field: &Field) {
    let before = matched(field).await;
    let witness = field.witness("web").await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    let strategy = json!({ "updateStrategy": { "rollingUpdate": rolling } });
    field.image_and("web", "example.com/app:3", strategy).await;
    field.settled("web").await;
    let after = matched(field).await;
    assert!(after.keys().all(|name| !before.contains_key(name)));
    assert!(
        after
            .values()
            .all(|claim| before.values().all(|old| old != claim))
    );
    let seen = witness.seen();
    assert!(seen.most <= PODS + 1 && seen.least_serving >= PODS, "{seen:?}");
}

/// Fewer of them.
async fn scaled_down(field: &Field, to: usize) {
    let before = matched(field).await;
    let witness = field.witness("web").await;
    field.edit("web", json!({ "spec": { "replicas": to } })).await;
    field.settled("web").await;
    let after = matched(field).await;
    assert!(after.iter().all(|(name, claim)| before.get(name) == Some(claim)));
    let seen = witness.seen();
    assert!(seen.most == PODS && seen.least_serving >= to, "{seen:?}");
}

/// A CloneSet's whole life, of whose requests of these sorts every so many are lost, so often each. How many creations
/// more than Pods there were, and how often it was not known whether there is a Pod.
async fn life(
    (namespace, reuse): (&str, bool),
    (loss, every, times): (Loss, usize, usize),
    sorts: &[&'static str],
) -> (usize, usize) {
    let bed = shared().await;
    let field = Field::new(bed.world, namespace).await;
    for what in sorts {
        bed.proxy.lose(namespace, what, loss, every, times);
    }
    made(&field, reuse).await;
    updated_in_place(&field).await;
    one_replaced(&field).await;
    replaced(&field).await;
    scaled_down(&field, 2).await;
    let lost = bed.proxy.lost(namespace);
    let count = |what: &str| lost.iter().filter(|one| one.what == what).count();
    for what in &WORK[..3] {
        assert!(count(what) > 0, "no {what} was lost: {lost:?}");
    }
    (creations(&field) - (PODS + 1 + PODS), count("get pods"))
}

#[tokio::test]
async fn answers_that_are_lost_change_nothing() {
    let (writes, all) = tokio::join!(
        life(("answers-third", true), (Loss::Answer, 3, ALWAYS), &WORK[..9]),
        life(("answers-second", false), (Loss::Answer, 2, ALWAYS), &WORK)
    );
    assert_eq!(writes, (0, 0), "no Pod was asked for twice");
    assert!(
        all.0 <= all.1,
        "{all:?}: asked for again where it could not be read"
    );
}

#[tokio::test]
async fn requests_that_are_lost_are_sent_again() {
    let (third, second) = tokio::join!(
        life(("requests-third", false), (Loss::Request, 3, ALWAYS), &WORK),
        life(("requests-second", true), (Loss::Request, 2, ALWAYS), &WORK)
    );
    assert_eq!((third.0, second.0), (0, 0), "what arrived was not sent again");
}

#[tokio::test]
async fn answers_that_never_come_and_requests_that_come_late_do_no_harm() {
    // Each takes the manager's patience.
    let (silent, late) = tokio::join!(
        life(("silence", true), (Loss::Silence, 2, 1), &WORK[..3]),
        life(("late", false), (Loss::Late, 2, 1), &WORK[..3])
    );
    assert_eq!(silent.0, 0);
    assert_eq!(late.0, 1, "the one that came late");
}

/// The API server is out of reach from the third Pod's creation on, until the manager leads no more.
#[tokio::test]
async fn an_outage_in_the_middle_leaves_nothing_behind() {
    let bed = alone().await;
    let field = Field::new(bed.world, "outage").await;
    bed.proxy.lose("outage", "create pods", Loss::Outage, 3, 1);
    let witness = field.witness("web").await;
    field.set("web", spec(false)).await;
    bed.manager.until_it_says("standing by");
    bed.proxy.open();
    field.settled("web").await;
    matched(&field).await;
    assert!(witness.seen().most <= PODS, "{:?}", witness.seen());
    assert!(creations(&field) <= 2 * PODS, "each is asked for twice at most");
}

/// A watch that brings nothing more of some Pods is not waited for: what we wrote is read after a while.
#[tokio::test]
async fn news_that_never_comes_is_not_waited_for() {
    let bed = shared().await;
    let field = Field::new(bed.world, "unheard").await;
    bed.proxy
        .lose("unheard", "watch pods", Loss::Request, 1, usize::MAX);
    field.set("web", json!({ "replicas": 2 })).await;
    field.settled("web").await;
    assert!(bed.proxy.answered("unheard", "get pods") > 0, "they were read");
}

/// The watch says still that a ReplicaSet has the Pods, when a CloneSet comes that is to take them over.
#[tokio::test]
async fn orphans_that_the_watch_does_not_show_yet_are_adopted() {
    let bed = shared().await;
    let field = Field::new(bed.world, "orphaned").await;
    let sets = field.api("apps", "v1", "ReplicaSet");
    let labels = json!({ "app": "web" });
    let containers = json!([{ "name": "app", "image": "example.com/app:1" }]);
    let template = json!({ "metadata": { "labels": labels }, "spec": { "containers": containers } });
    let spec = json!({ "selector": { "matchLabels": labels }, "replicas": 2, "template": template });
    let owner = field
        .create(&sets, json!({ "metadata": { "name": "web" }, "spec": spec }))
        .await;
    let owner = json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web",
        "uid": owner.metadata.uid, "controller": true, "blockOwnerDeletion": true }]);
    for name in ["web-a", "web-b"] {
        let metadata = json!({ "name": name, "labels": labels, "ownerReferences": owner });
        let pod = json!({ "metadata": metadata, "spec": { "containers": containers } });
        field.create(&field.pods(), pod).await;
    }
    let before = identities(&field.pods_of("web").await);
    // The watch has brought those, too, then.
    field.set("late", json!({ "replicas": 1 })).await;
    field.settled("late").await;
    bed.proxy
        .lose("orphaned", "watch pods", Loss::Request, 1, usize::MAX);
    let orphan = [
        "delete",
        "replicaset",
        "web",
        "--cascade=orphan",
        "--namespace=orphaned",
    ];
    bed.world.plane.kubectl(&orphan).unwrap();
    let paused = json!({ "replicas": 2, "updateStrategy": { "rollingUpdate": { "paused": true } } });
    field.set("web", paused).await;
    let adopted = |set: &CloneSet| set.status.as_ref().is_some_and(|status| status.replicas == 2);
    field.status("web", "has both", adopted).await;
    assert_eq!(identities(&field.pods_of("web").await), before);
}
