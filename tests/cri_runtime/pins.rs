//! Images that are pinned for a time, as kubelet sees them through CRI.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use kruise_cri::{ImagePins, Runtime as _};

use crate::fixture::RuntimeFixture;

const IMAGE: &str = "fake.test/pinned:1";

/// Waits until CRI says so: containerd's CRI plugin learns of labels by an event.
async fn wait_for_pinned(fixture: &RuntimeFixture, expected: bool) {
    let start = Instant::now();
    loop {
        let image = fixture.client.image_status(IMAGE).await.unwrap().unwrap();
        if image.pinned == expected {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "pinned is not {expected} after 30 s: {image:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn labels(fixture: &RuntimeFixture) -> String {
    fixture
        .runtime
        .ctr(&["images", "list", &format!("name=={IMAGE}")])
        .unwrap()
        .replace(IMAGE, "")
}

pub async fn image_is_pinned_until_a_time(fixture: &RuntimeFixture) {
    let (client, now) = (&fixture.client, Timestamp::now());
    let hours = |hours| now + SignedDuration::from_hours(hours);
    assert_eq!(
        client.unpin_ended_images(now).await.unwrap(),
        ImagePins::default()
    );
    fixture
        .registry
        .image("pinned", "1", 512, "amd64")
        .allow(usize::MAX);
    fixture.pull(IMAGE).await.unwrap();
    wait_for_pinned(fixture, false).await;
    client.pin_image(IMAGE, hours(2)).await.unwrap();
    wait_for_pinned(fixture, true).await;
    // The later end counts.
    client.pin_image(IMAGE, hours(1)).await.unwrap();
    let pins = ImagePins {
        count: 1,
        next_end: Some(hours(2)),
    };
    assert_eq!(client.unpin_ended_images(hours(1)).await.unwrap(), pins);
    wait_for_pinned(fixture, true).await;
    assert_eq!(
        client.unpin_ended_images(hours(2)).await.unwrap(),
        ImagePins::default()
    );
    wait_for_pinned(fixture, false).await;
    let labels = labels(fixture);
    assert!(!labels.contains("pinned"), "{labels}");
    let absent = client.pin_image("fake.test/absent:1", hours(1)).await;
    absent.unwrap_err();
    // containerd forgets it with another pull; ours sets it again.
    client.pin_image(IMAGE, hours(1)).await.unwrap();
    fixture.pull(IMAGE).await.unwrap();
    wait_for_pinned(fixture, true).await;
    let one_hour = ImagePins {
        count: 1,
        next_end: Some(hours(1)),
    };
    // It is renewed as it ends.
    for _ in 0..30 {
        let (unpinned, pinned) = tokio::join!(
            client.unpin_ended_images(hours(1)),
            client.pin_image(IMAGE, hours(2))
        );
        unpinned.unwrap();
        pinned.unwrap();
        let pins = client.unpin_ended_images(hours(1)).await.unwrap();
        assert_eq!((pins.count, pins.next_end), (1, Some(hours(2))));
        client.unpin_ended_images(hours(2)).await.unwrap();
        client.pin_image(IMAGE, hours(1)).await.unwrap();
    }
    assert_eq!(client.unpin_ended_images(now).await.unwrap(), one_hour);
    client.unpin_ended_images(hours(1)).await.unwrap();
}

pub async fn foreign_pin_stays(fixture: &RuntimeFixture) {
    let (client, now) = (&fixture.client, Timestamp::now());
    let pin = "io.cri-containerd.pinned=pinned";
    fixture.runtime.ctr(&["images", "label", IMAGE, pin]).unwrap();
    wait_for_pinned(fixture, true).await;
    client.pin_image(IMAGE, now).await.unwrap();
    assert_eq!(
        client.unpin_ended_images(now).await.unwrap(),
        ImagePins::default()
    );
    wait_for_pinned(fixture, true).await;
}
