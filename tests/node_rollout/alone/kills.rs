//! The manager is killed while Pods are being updated, at moments that chance decides.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::time::Duration;

use serde_json::{Value, json};

use super::fresh_image;
use crate::pods::{container, identities, revision, runs, state};
use crate::workloads::{Bed, Seen, Space, alone};
use support::chance::Chance;

/// The longest time between a Pod's beginning to be updated and a kill: about what an update takes.
const LATEST: u64 = 2500;

/// How often the manager is killed: 50 times in `cargo xtask test --soak`.
fn kills() -> u32 {
    if std::env::var_os("KRUISE_SOAK").is_some() {
        50
    } else {
        5
    }
}

/// Waits until so many Pods run the image or are on their way to it, then a while, and until a Pod is being updated;
/// whether one is: otherwise the rollout has ended.
async fn moment(space: &Space<impl Deref<Target = Bed>>, image: &str, begun: usize, wait: Duration) -> bool {
    let on_its_way = |pod: &&&Value| pod["spec"]["containers"][0]["image"] == image;
    space
        .until_pods("web", "some are being updated", |pods| {
            pods.iter().filter(on_its_way).count() >= begun
        })
        .await;
    // Chance, not a wait for anything.
    tokio::time::sleep(wait).await;
    let updating = |pod: &Value| state(pod) == "Updating";
    let pods = space
        .until_pods("web", "one is being updated, or all are", |pods| {
            pods.iter().any(|pod| updating(pod)) || pods.iter().all(|pod| runs(pod, image))
        })
        .await;
    pods.iter().any(updating)
}

/// Waits for the end of the rollout: the same Pods, each restarted once for each of the updates.
async fn ended_right(
    space: &Space<impl Deref<Target = Bed>>,
    image: &str,
    before: &BTreeMap<String, String>,
    updates: u32,
) {
    let status = space.settled("web").await;
    space.settled("new").await;
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), *before, "update {updates}");
    for pod in pods.values() {
        assert!(runs(pod, image), "update {updates}: {pod}");
        assert_eq!(container(pod, "app").restarts, i64::from(updates), "{pod}");
        assert_eq!(revision(pod), status.update_revision);
    }
}

fn within_budget(web: &Seen, new: &Seen, kill: u32) {
    assert!(
        web.least_serving >= 2 && web.most <= 3,
        "kill {kill}, one may be unavailable: {web:#?}"
    );
    assert!(
        new.least_serving >= 2 && new.most <= 3,
        "kill {kill}, one may be beyond two: {new:#?}"
    );
}

#[tokio::test]
async fn a_manager_that_dies_in_mid_rollout_is_followed_by_one_that_ends_it_right() {
    let mut space = alone().await;
    let mut chance = Chance::new();
    let surging = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    let set = json!({ "replicas": 2, "updateStrategy": { "rollingUpdate": surging } });
    space.set("web", json!({ "replicas": 3 })).await;
    space.set("new", set).await;
    space.settled("web").await;
    space.settled("new").await;
    let before = space.identities("web").await;
    let (web, new) = (space.witness("web").await, space.witness("new").await);
    let (mut updates, kills) = (0, kills());
    let mut wanted = "kruise-test/term:1".to_owned();
    let mut kill = 0;
    while kill < kills {
        if space.pods_of("web").await.values().all(|pod| runs(pod, &wanted)) {
            ended_right(&space, &wanted, &before, updates).await;
            updates += 1;
            wanted = fresh_image(&space, &format!("number-{updates}"));
            space.image("web", &wanted).await;
            space.image("new", &wanted).await;
        }
        let begun = usize::try_from(1 + chance.below(3)).unwrap();
        let wait = Duration::from_millis(chance.below(LATEST));
        if !moment(&space, &wanted, begun, wait).await {
            continue;
        }
        space.bed.manager.kill().unwrap();
        kill += 1;
        let states: Vec<String> = space.pods_of("web").await.values().map(state).collect();
        println!("kill {kill}: {begun} begun, {wait:?} later: {states:?}");
        space.bed.manager.start().unwrap();
        space.bed.manager.until_it_says("leading");
        within_budget(&web.seen(), &new.seen(), kill);
    }
    ended_right(&space, &wanted, &before, updates).await;
    within_budget(&web.seen(), &new.seen(), kills);
    let looks = web.seen().looks;
    println!("{kills} kills in {updates} rollouts; {looks} states looked at");
    let ever = new.seen().ever.len();
    assert_eq!(
        ever,
        2 + 2 * usize::try_from(updates).unwrap(),
        "one new Pod for each update"
    );
}
