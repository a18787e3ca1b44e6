//! What happens while the daemon is away.

use std::ops::Deref;

use kruise_api::container_hash::env_hash;
use serde_json::{Value, json};
use testbed::cluster::finish;

use crate::bed::{Bed, Test, alone};
use crate::pod::{Told, container, from_annotation};

#[tokio::test]
async fn kill_9_in_mid_restart_ends_in_one_restart() {
    let mut test = alone().await;
    let mut main = container("main", &[from_annotation("CFG", "cfg")]);
    let seconds = json!({"name": "SECONDS_TO_STOP", "value": "3"});
    main["env"].as_array_mut().unwrap().push(seconds);
    test.make("web", json!([main]), json!({})).await;
    test.told("web", "it is told of", |_, _| true).await;
    test.begin_update("web").await;
    test.patch("web", json!({"metadata": {"annotations": {"cfg": "2"}}}))
        .await;
    test.mark("main.term").await;
    let row = restarts(&test);
    assert_eq!(
        (&row["pod"], &row["container"], &row["step"]),
        (&json!("web"), &json!("main"), &json!("stopping"))
    );
    test.bed.daemon.kill().unwrap();
    test.bed.daemon.start().unwrap();
    let pod = test.restarted("web", "main", 1).await;
    assert_eq!(pod.told("main").1, env_hash([("CFG", "2")]));
    assert_eq!(test.environments("web-main"), ["1", "2"]);
    assert_eq!(test.writes("web"), 2);
}

/// What the daemon says of the one restart in this test's namespace.
fn restarts<G: Deref<Target = Bed>>(test: &Test<G>) -> Value {
    let runtime = &test.bed.node.runtime;
    let mut status = runtime.command(support::binaries::daemon());
    status.args(["status", "--output", "json", "--control-socket"]);
    let said = finish(status.arg(runtime.dir().join("control.sock"))).unwrap();
    let said: Value = serde_json::from_str(&said).unwrap();
    let rows = said["restarts"].as_array().unwrap();
    let ours: Vec<_> = rows
        .iter()
        .filter(|row| row["namespace"] == test.namespace.as_str())
        .collect();
    assert_eq!(ours.len(), 1, "{said}");
    ours[0].clone()
}

#[tokio::test]
async fn what_happened_while_it_was_away_is_told_when_it_comes_back() {
    let mut test = alone().await;
    let main = || json!([container("main", &[from_annotation("CFG", "cfg")])]);
    test.make("before", main(), json!({})).await;
    test.told("before", "it is told of", |_, _| true).await;
    test.bed.daemon.kill().unwrap();
    test.make("born", main(), json!({})).await;
    test.begin_update("before").await;
    test.patch("before", json!({"metadata": {"annotations": {"cfg": "2"}}}))
        .await;
    test.bed.daemon.start().unwrap();
    let born = test.told("born", "it is told of", |_, _| true).await;
    assert_eq!(born.told("main").1, env_hash([("CFG", "1")]));
    let before = test.restarted("before", "main", 1).await;
    assert_eq!(before.told("main").1, env_hash([("CFG", "2")]));
    assert_eq!([test.writes("born"), test.writes("before")], [1, 2]);
}
