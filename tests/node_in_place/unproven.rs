//! Updates while no daemon says what containers were started with: what can be proven without it ends, and what
//! cannot waits and says so. kubelet is held at what the tests need to see by hooks that it waits for.

use std::ops::Deref;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::bed::{Bed, Test};
use crate::field::{Field, alone, container, holds, restarted_once, same_container, same_pod, status};
use crate::pod::{self, from_annotation};

const A: &str = "kruise-test/term:1";
/// The same image as `A`.
const A_AGAIN: &str = "kruise-test/term:1-again";
const B: &str = "kruise-test/term:2";
const C: &str = "busybox:1.36";

#[tokio::test]
async fn what_can_be_proven_ends_and_what_cannot_waits_for_the_daemon() {
    let mut test = alone().await;
    test.bed.daemon.kill().unwrap();
    tokio::join!(
        another_image(&test),
        crashed_before_kubelet_saw_it(&test),
        overtaken(&test),
        taken_back(&test),
        another_tag(&test),
        the_tag_that_is_reported(&test),
        environment(&test),
    );
    let waiting = test.pod_of("twin").await;
    test.bed.daemon.start().unwrap();
    test.settled("env").await;
    test.settled("twin").await;
    let after = test.pod_of("twin").await;
    same_pod(&waiting, &after);
    same_container(&waiting, &after, "app");
}

/// Makes a CloneSet of one Pod, whose container can be made to crash, and whose starts can be held up.
async fn make<G: Deref<Target = Bed>>(test: &Test<G>, name: &str) -> Pod {
    let mut app = container("app", A);
    let script = format!(
        "trap 'exit 0' TERM; while :; do [ -e /log/{name}.crash ] && rm /log/{name}.crash && exit 1; sleep 0.1; done"
    );
    app["command"] = json!(["sh", "-c", script]);
    let hook = format!("echo start >> /log/{name}.starts; while [ -e /log/{name}.hold ]; do sleep 0.1; done");
    app["lifecycle"] = json!({"postStart": {"exec": {"command": ["sh", "-c", hook]}}});
    test.set(name, 1, json!([app]), json!({})).await;
    test.pod_of(name).await
}

fn put<G: Deref<Target = Bed>>(test: &Test<G>, file: String) {
    std::fs::write(test.log.join(file), "").unwrap();
}

/// Waits until the container has been started so often; kubelet is then in the hook where that is held.
async fn starts<G: Deref<Target = Bed>>(test: &Test<G>, name: &str, times: usize) {
    let path = test.log.join(format!("{name}.starts"));
    test.until(&format!("start {times} of {name}"), || async {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        (text.lines().count() >= times).then_some(())
    })
    .await;
}

fn wants(pod: &Pod, image: &str) -> bool {
    pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some(image)
}

/// Waits until the Pod is told to run that image.
async fn told<G: Deref<Target = Bed>>(test: &Test<G>, pod: &Pod, image: &str) {
    let wanted = |pod: &Pod| wants(pod, image);
    test.follow(&pod.name_any(), "the new image in its spec", wanted)
        .await;
}

/// Lets kubelet go on, and follows the Pod until it is done with that image: `wrong` says which versions of it must
/// not be in use, of which some must have been seen.
async fn let_go<G: Deref<Target = Bed>>(
    test: &Test<G>,
    pod: &Pod,
    image: &str,
    set: &str,
    wrong: impl Fn(&Pod) -> bool,
) -> Pod {
    let name = pod.name_any();
    let done = |pod: &Pod| wants(pod, image) && holds(pod, "InPlaceUpdateReady") && holds(pod, "Ready");
    let hold = test.log.join(format!("{set}.hold"));
    let go = async { std::fs::remove_file(hold).unwrap() };
    let ((_, history), ()) = test.follow_from(&name, "in use again", done, go).await;
    let wrong: Vec<&Pod> = history.iter().filter(|pod| wrong(pod)).collect();
    assert!(!wrong.is_empty(), "kubelet never told of it");
    for pod in wrong {
        assert!(!holds(pod, "InPlaceUpdateReady"), "{:#?}", status(pod, "app"));
        assert_ne!(pod.labels()["lifecycle.apps.kruise.io/state"], "Normal");
    }
    test.settled(set).await;
    test.get_pod(&name).await
}

async fn another_image<G: Deref<Target = Bed>>(test: &Test<G>) {
    let before = make(test, "plain").await;
    test.image("plain", 0, B).await;
    test.settled("plain").await;
    let after = test.pod_of("plain").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
}

/// The container crashes, and kubelet is about to start the old image again when the new one is asked for.
async fn crashed_before_kubelet_saw_it<G: Deref<Target = Bed>>(test: &Test<G>) {
    let before = make(test, "crash").await;
    put(test, "crash.hold".into());
    put(test, "crash.crash".into());
    starts(test, "crash", 2).await;
    test.image("crash", 0, B).await;
    told(test, &before, B).await;
    let old = status(&before, "app").clone();
    let crashed = |pod: &Pod| {
        let now = status(pod, "app");
        wants(pod, B) && now.container_id != old.container_id && now.image_id == old.image_id
    };
    let after = let_go(test, &before, B, "crash", crashed).await;
    same_pod(&before, &after);
    assert_ne!(status(&after, "app").image_id, old.image_id);
    assert_eq!(status(&after, "app").restart_count, old.restart_count + 2);
}

/// A third image is asked for while kubelet starts the second.
async fn overtaken<G: Deref<Target = Bed>>(test: &Test<G>) {
    let before = make(test, "late").await;
    put(test, "late.hold".into());
    test.image("late", 0, B).await;
    starts(test, "late", 2).await;
    test.image("late", 0, C).await;
    told(test, &before, C).await;
    let second = |pod: &Pod| wants(pod, C) && status(pod, "app").image.ends_with(B);
    let after = let_go(test, &before, C, "late", second).await;
    same_pod(&before, &after);
    assert!(status(&after, "app").image.ends_with(C));
    assert_eq!(status(&after, "app").restart_count, 2);
}

/// The update is taken back while kubelet starts the new image.
async fn taken_back<G: Deref<Target = Bed>>(test: &Test<G>) {
    let before = make(test, "back").await;
    put(test, "back.hold".into());
    test.image("back", 0, B).await;
    starts(test, "back", 2).await;
    test.image("back", 0, A).await;
    told(test, &before, A).await;
    let second = |pod: &Pod| wants(pod, A) && status(pod, "app").image.ends_with(B);
    let after = let_go(test, &before, A, "back", second).await;
    same_pod(&before, &after);
    assert_eq!(status(&after, "app").image_id, status(&before, "app").image_id);
    assert_eq!(status(&after, "app").restart_count, 2);
}

/// The runtime reports either tag by the same name, and the image's ID is the same.
async fn another_tag<G: Deref<Target = Bed>>(test: &Test<G>) {
    let before = make(test, "twin").await;
    test.image("twin", 0, A_AGAIN).await;
    let said = test.says("twin", "the new image is not confirmed yet").await;
    assert_eq!(said.status.unwrap().updated_available_replicas, Some(0));
    let after = test.pod_of("twin").await;
    restarted_once_but_not_in_use(&before, &after);
}

/// The other way round: of the two tags it is the new one that the runtime reports.
async fn the_tag_that_is_reported<G: Deref<Target = Bed>>(test: &Test<G>) {
    let containers = json!([container("app", A_AGAIN)]);
    test.set("tag", 1, containers, json!({})).await;
    let before = test.pod_of("tag").await;
    test.image("tag", 0, A).await;
    test.settled("tag").await;
    let after = test.pod_of("tag").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
    assert_eq!(status(&before, "app").image_id, status(&after, "app").image_id);
}

/// Nobody but the daemon restarts a container for its environment.
async fn environment<G: Deref<Target = Bed>>(test: &Test<G>) {
    let app = pod::container("app", &[from_annotation("CFG", "cfg")]);
    let metadata = json!({"labels": {"app": "env"}, "annotations": {"cfg": "one"}});
    test.set(
        "env",
        1,
        json!([app]),
        json!({"template": {"metadata": metadata}}),
    )
    .await;
    let before = test.pod_of("env").await;
    let change = |template: &mut Value| template["metadata"]["annotations"]["cfg"] = json!("two");
    test.template("env", change).await;
    test.says("env", "the change of its environment is not confirmed yet")
        .await;
    same_container(&before, &test.pod_of("env").await, "app");
}

fn restarted_once_but_not_in_use(before: &Pod, after: &Pod) {
    same_pod(before, after);
    assert_ne!(
        status(before, "app").container_id,
        status(after, "app").container_id
    );
    assert!(!holds(after, "InPlaceUpdateReady") && !holds(after, "Ready"));
    let look: Value = json!(after.labels()["lifecycle.apps.kruise.io/state"]);
    assert_eq!(look, "Updating");
}
