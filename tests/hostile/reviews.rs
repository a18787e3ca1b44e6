//! Forged reviews on the port that anybody may reach.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt, stream};
use http::Request;
use kruise_api::Kind;
use kube::client::ConfigExt;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use crate::world::{Objects, World, count, target, world};
use support::shapes::{DELETION, admission_reviews, conversion_reviews, deletion_review, every_shape, full};
use support::waits;

/// How a stranger reaches the webhooks' port.
fn unchecked(world: &World) -> Config {
    let mut config = Config::new(format!("https://127.0.0.1:{}", world.webhooks).parse().unwrap());
    config.accept_invalid_certs = true;
    config
}

/// A stranger who reaches the webhooks' port.
fn stranger(world: &World) -> Client {
    Client::try_from(unchecked(world)).unwrap()
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

/// Connections of one address that have heavy reviews. Their texts fit into its share of the room, 64 MiB.
const HEAVY: usize = 200;
/// Bytes of a list that is converted at once; what is longer waits for its turn in any case.
const LIST: usize = 250 << 10;

/// Sends the same request again and again, until it is dropped.
async fn ask_for_ever(world: &World, from: Ipv4Addr, request: &[u8]) {
    let tls = TlsConnector::from(Arc::new(unchecked(world).rustls_client_config().unwrap()));
    loop {
        let stream = connection(world, from).await;
        let stream = tls.connect("localhost".try_into().unwrap(), stream).await;
        // Whoever asks too much may be let go at any time.
        let Ok(mut stream) = stream else { continue };
        while stream.write_all(request).await.is_ok() {
            let mut answer = [0; 64 << 10];
            let Ok(1..) = stream.read(&mut answer).await else {
                break;
            };
        }
    }
}

#[tokio::test]
async fn a_crowd_of_heavy_reviews_keeps_no_other_address_waiting() {
    let world = world().await;
    let [mut review, _] = conversion_reviews("cloneset");
    let object = review["request"]["objects"][0].take();
    let objects = LIST / object.to_string().len();
    review["request"]["objects"] = vec![object; objects].into();
    let body = review.to_string();
    let head = format!(
        "POST /convert HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let request = [head, body].concat();
    let from = Ipv4Addr::new(127, 0, 0, 2);
    let crowd = (0..HEAVY).map(|_| ask_for_ever(&world, from, request.as_bytes()));
    let asked = async {
        let before = world.lists_converted();
        let _: () = waits::until("the crowd is served", &|| world.tail(), || async {
            (world.lists_converted() > before + HEAVY as u64).then_some(())
        })
        .await;
        // The API server gives up after 10 s, and says that it was the webhook.
        let requests = Objects::ours(&world.admin().await, "v1beta1", "ContainerRecreateRequest");
        for number in 0..10 {
            let (start, before) = (Instant::now(), world.lists_converted());
            let spec = json!({ "podName": "none", "containers": [{ "name": "main" }] });
            let request = json!({ "metadata": { "name": format!("crowded-{number}") }, "spec": spec });
            let words = requests.make(&request).await.unwrap_err();
            assert!(words.contains("there is no such Pod"), "{words}");
            let lists = world.lists_converted() - before;
            assert!(lists < HEAVY as u64 / 4, "{lists} lists of the crowd came first");
            println!(
                "answered after {:?}, {lists} lists of the crowd meanwhile",
                start.elapsed()
            );
        }
    };
    tokio::select! {
        _ = futures::future::join_all(crowd) => unreachable!("they ask for ever"),
        () = asked => {}
    }
    world.still_works("after-crowd").await;
}
