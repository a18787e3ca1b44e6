//! Forged reviews on the port that anybody may reach.

use std::net::{Ipv4Addr, SocketAddr};

use futures::{StreamExt, stream};
use http::Request;
use kruise_api::Kind;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpSocket, TcpStream};

use crate::world::{Objects, World, count, target, world};
use support::shapes::{DELETION, admission_reviews, conversion_reviews, deletion_review, every_shape, full};
use support::waits;

/// A stranger who reaches the webhooks' port.
fn stranger(world: &World) -> Client {
    let mut config = Config::new(format!("https://127.0.0.1:{}", world.webhooks).parse().unwrap());
    config.accept_invalid_certs = true;
    Client::try_from(config).unwrap()
}

async fn post(stranger: &Client, path: &str, body: String) -> (u16, String) {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.body(kube::client::Body::from(body.into_bytes())).unwrap();
    let answer = stranger.send(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = axum::body::to_bytes(axum::body::Body::new(answer.into_body()), usize::MAX)
        .await
        .unwrap();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn a_forged_review_of_any_shape_is_answered() {
    let world = world().await;
    let stranger = stranger(&world);
    let wrong = [
        json!(null),
        json!("x?y="),
        json!(-1),
        json!([{}]),
        json!({ "": 1 }),
    ];
    let mut asked = Vec::new();
    for kind in Kind::ALL.map(|kind| kind.row().lower) {
        // That of a creation is among them: the one without an old object.
        let [_, update] = admission_reviews(kind);
        // Of a container that is there, so that the review is decided to its end.
        let mut update = update.to_string();
        for (shape, real) in [("ns", "default"), ("me", &target(0)), ("c", "main")] {
            update = update.replace(&json!(shape).to_string(), &json!(real).to_string());
        }
        let update = serde_json::from_str(&update).unwrap();
        for body in every_shape(&update, &wrong) {
            for step in ["mutate", "validate"] {
                asked.push((format!("/{step}-apps-kruise-io-{kind}"), body.clone()));
            }
        }
        for review in conversion_reviews(kind) {
            asked.extend(
                every_shape(&review, &wrong)
                    .into_iter()
                    .map(|body| ("/convert".to_owned(), body)),
            );
        }
    }
    // Of a Namespace that there is, and that has Pods.
    for body in every_shape(&deletion_review("default"), &wrong) {
        asked.push((DELETION.to_owned(), body));
    }
    let answers = stream::iter(asked).map(|(path, body)| {
        let stranger = &stranger;
        async move {
            let (status, said) = post(stranger, &path, body.clone()).await;
            assert!([200, 400].contains(&status), "{status} {said} to {body}");
        }
    });
    answers.buffer_unordered(8).collect::<()>().await;
    world.still_works("after-shapes").await;
}

#[tokio::test]
async fn a_forged_namespace_or_name_stores_nothing_and_shows_no_secret() {
    const SECRET: &str = "aHVudGVyMi1uZXZlci1sb2dnZWQ=";
    let world = world().await;
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "token", "namespace": "kube-system" },
        "data": { "password": SECRET } });
    world.plane.apply(&secret.to_string()).unwrap();
    let stranger = stranger(&world);
    let texts = [
        "default/podtemplates?x=",
        "default/podtemplates#",
        "kube-system/secrets?x=",
        "kube-system/secrets#",
        "../../secrets?x=",
        "?",
        "",
        "%2e%2e",
        "A\n",
    ];
    for kind in Kind::ALL.map(|kind| kind.row().lower) {
        for text in texts {
            for (namespace, name) in [(text, "target-0"), ("default", text), ("kube-system", text)] {
                let mut object: Value = full(kind);
                object["metadata"]["name"] = json!(name);
                object["spec"]["podName"] = json!(name);
                object["spec"]["selector"] = json!({ "names": [name], "matchLabels": { "app": "web" } });
                object["spec"]["scaleStrategy"] = json!({ "podsToDelete": [name] });
                let review = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": { "uid": "u",
                    "kind": { "version": "v1beta1" }, "namespace": namespace, "name": name, "object": object } });
                for step in ["mutate", "validate"] {
                    let path = format!("/{step}-apps-kruise-io-{kind}");
                    let (status, said) = post(&stranger, &path, review.to_string()).await;
                    assert_eq!(status, 200, "{said}");
                    assert!(!said.contains(SECRET), "{said}");
                }
            }
        }
    }
    for text in texts.into_iter().chain(["kube-system"]) {
        let review = deletion_review(text).to_string();
        let (status, said) = post(&stranger, DELETION, review).await;
        assert_eq!(status, 200, "{said}");
        // Of none of these names there is a Namespace with Pods.
        assert!(
            said.contains("\"allowed\":true") && !said.contains(SECRET),
            "{said}"
        );
    }
    let (_, said) = post(&stranger, DELETION, deletion_review("default").to_string()).await;
    assert!(said.contains("active pods"), "{said}");
    assert_eq!(count(&world.admin().await, "PodTemplate").await, 0);
    assert!(!world.webhook_log().contains(SECRET), "a Secret is in the log");
    world.still_works("after-names").await;
}

/// Connections that each of two addresses opens; all may have 512, one 256.
const FLOOD: usize = 300;
/// What the container of the webhooks has, in bytes.
const CONTAINER: u64 = 512 << 20;

/// A connection from that address to the webhooks.
async fn connection(world: &World, from: Ipv4Addr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::new(from.into(), 0)).unwrap();
    let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), world.webhooks);
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn a_flood_of_connections_is_refused_and_the_api_server_is_answered() {
    let world = world().await;
    let refusals = || {
        let log = world.webhook_log();
        log.matches("refused a connection: this address has its share")
            .count()
    };
    let before = refusals();
    let mut flood = Vec::new();
    for last in [2, 3] {
        for _ in 0..FLOOD {
            flood.push(connection(&world, Ipv4Addr::new(127, 0, 0, last)).await);
        }
    }
    let surplus = FLOOD - 256;
    let _: () = waits::until("the surplus is refused", &|| world.tail(), || async {
        (refusals() >= before + surplus).then_some(())
    })
    .await;
    // Only the webhook knows that.
    let requests = Objects::ours(&world.admin().await, "v1beta1", "ContainerRecreateRequest");
    let spec = json!({ "podName": "none", "containers": [{ "name": "main" }] });
    let words = requests
        .make(&json!({ "metadata": { "name": "flooded" }, "spec": spec }))
        .await;
    let words = words.unwrap_err();
    assert!(words.contains("there is no such Pod"), "{words}");
    let closed = &mut flood[FLOOD - 1];
    let ended = tokio::time::timeout(waits::PATIENCE, closed.read(&mut [0])).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{ended:?}");
    world.still_works("after-flood").await;
    let most = world.webhook_memory();
    assert!(most < CONTAINER, "{most} bytes");
    drop(flood);
}
