//! Two replicas: one leads, and the other takes over when it dies, with nothing lost or done twice.

use std::time::Instant;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::flowcontrol::v1::FlowSchema;
use kruise::api::node_image::NodeImage;
use kube::api::Api;
use kube::client::Body;
use serde_json::json;
use xtask::cluster::Bound;

use crate::waits;
use crate::world::{
    Answer, World, answer, asked, completed, connect, create, job, jobs, nodes, until, world,
};

fn holder(lease: &Lease) -> String {
    let spec = lease.spec.as_ref();
    spec.and_then(|s| s.holder_identity.clone()).unwrap_or_default()
}

/// Who leads, once that is somebody other than `before`.
async fn handed_over(leases: &Api<Lease>, what: &'static str, before: &str) -> String {
    let before = before.to_owned();
    let other = move |l: &Lease| !holder(l).is_empty() && holder(l) != before;
    holder(&until(leases, "kruise-manager", what, other).await)
}

#[tokio::test]
async fn a_second_replica_takes_over_where_the_first_died() {
    let world = World::new();
    let admin = world.admin().await;
    let leases = Api::<Lease>::namespaced(admin.client.clone(), "kruise-system");
    let images = Api::<NodeImage>::all(admin.client.clone());
    let mut first = world.manager("kruise-manager-1");
    first.start().unwrap();
    let led = handed_over(&leases, "held", "").await;
    let mut second = world.manager("kruise-manager-2");
    second.start().unwrap();
    nodes(&admin, &["elect-1", "elect-2"], json!({})).await;
    let spec = json!({ "image": "nginx:elect", "parallelism": 1 });
    create(&jobs(&admin), job("elect", spec)).await;
    asked(&admin, "elect-1", "nginx", "elect").await;

    let killed = Instant::now();
    first.kill().unwrap();
    // While nobody leads the daemon answers; the new leader must see it.
    answer(&admin, "elect-1", Answer::Succeeded).await;
    let taken = handed_over(&leases, "taken over", &led).await;
    asked(&admin, "elect-2", "nginx", "elect").await;
    println!("took over after {:?}", killed.elapsed());
    // A standby tries each second, so it leads five seconds after the last renewal at most; a busy machine adds its own.
    let lease = leases.get("kruise-manager").await.unwrap();
    assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(4));
    answer(&admin, "elect-2", Answer::Succeeded).await;
    let ended = until(&jobs(&admin), "elect", "ended", completed).await;
    assert_eq!(ended.status.unwrap().succeeded, 2);
    for node in ["elect-1", "elect-2"] {
        let image = images.get(node).await.unwrap();
        let tags = &image.spec.images["nginx"].tags;
        assert_eq!(
            (tags.len(), tags[0].version, tags[0].owner_references.len()),
            (1, 0, 1)
        );
    }

    // One that ends in order gives the Lease up, so that the next one need not wait.
    let mut third = world.manager("kruise-manager-3");
    third.start().unwrap();
    second.stop().unwrap();
    let left = leases.get("kruise-manager").await.unwrap();
    assert_ne!(holder(&left), taken, "it has ended and holds the Lease still");
    handed_over(&leases, "handed over", &taken).await;
}

#[tokio::test]
async fn a_leader_without_api_server_stops_its_controllers_and_comes_back() {
    let mut world = World::new();
    let admin = world.admin().await;
    let mut manager = world.manager("kruise-manager");
    manager.start().unwrap();
    nodes(&admin, &["away-1", "away-2"], json!({})).await;
    let spec = json!({ "image": "nginx:away", "parallelism": 1 });
    create(&jobs(&admin), job("away", spec)).await;
    asked(&admin, "away-1", "nginx", "away").await;
    manager.until_it_says("leading");
    world.plane.apiserver.kill().unwrap();
    manager.until_it_says("standing by");
    world.plane.apiserver.start().unwrap();
    manager.until_it_says("leading");
    assert!(manager.running(), "{}", manager.tail());
    // A connection of the test itself may have died with the API server.
    let admin = world.admin().await;
    answer(&admin, "away-1", Answer::Succeeded).await;
    asked(&admin, "away-2", "nginx", "away").await;
    answer(&admin, "away-2", Answer::Succeeded).await;
    until(&jobs(&admin), "away", "ended", completed).await;
}

/// The FlowSchema that the API server chose for a request.
async fn flow(client: &kube::Client, path: &str) -> String {
    let request = http::Request::get(path).body(Body::empty()).unwrap();
    let answer = client.send(request).await.unwrap();
    let header = answer.headers().get("x-kubernetes-pf-flowschema-uid");
    header.unwrap().to_str().unwrap().to_owned()
}

#[tokio::test]
async fn renewals_do_not_queue_behind_other_requests() {
    let world = world();
    let manager = world
        .plane
        .kubeconfig_for("kruise-system", "kruise-manager", Bound::Nothing);
    let manager = connect(&manager.unwrap()).await.client;
    let schemas = Api::<FlowSchema>::all(world.admin().await.client);
    let ours = schemas.get("kruise-manager-leader-election").await.unwrap();
    let ours = ours.metadata.uid.unwrap();
    let lease = "/apis/coordination.k8s.io/v1/namespaces/kruise-system/leases/kruise-manager";
    // The API server reads schemas a moment after they are there.
    let chosen = async || (flow(&manager, lease).await == ours).then_some(());
    waits::until("the schema is in use", &String::new, chosen).await;
    assert_ne!(flow(&manager, "/api/v1/pods?limit=1").await, ours);
}
