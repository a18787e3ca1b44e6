//! Images that kubelet's garbage collection leaves alone until a time, by containerd's image service.
//!
//! CRI reports whether an image is pinned, but has no call that pins one. containerd's own API, on the same socket, does
//! it with a label of the image's record; a second label, ours, has the end, so that it survives the daemon. A pull of
//! the same tag replaces the record, and all its labels: a pull of ours sets them again.

use std::path::PathBuf;

use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{GetImageRequest, Image, ListImagesRequest, UpdateImageRequest};
use jiff::Timestamp;
use prost_types::FieldMask;
use tokio::sync::Mutex;
use tonic::transport::Channel;

use super::call::{CALL_TIMEOUT, Call, MAX_RESPONSE_BYTES};
use super::containerd::in_namespace;
use crate::{Error, ImagePins};

/// The label, with this value, of an image that is pinned.
const PINNED_LABEL: &str = "io.cri-containerd.pinned";
const PINNED: &str = "pinned";
/// The label with the end of a pin of ours, as RFC 3339.
const PINNED_UNTIL_LABEL: &str = "apps.kruise.io/pinned-until";

/// containerd's images.
pub(super) struct ImageRecords {
    socket: PathBuf,
    client: ImagesClient<Channel>,
    /// Held from the read of labels to their update: a pin may be renewed as it ends.
    update: Mutex<()>,
}

impl ImageRecords {
    pub(super) fn new(channel: Channel, socket: PathBuf) -> Self {
        Self {
            socket,
            client: ImagesClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES),
            update: Mutex::new(()),
        }
    }

    /// The end of a pin of ours, if there is one.
    pub(super) async fn pinned_until(&self, name: &str) -> Result<Option<Timestamp>, Error> {
        Ok(match self.get(name).await? {
            Some(image) if is_pinned(&image) => pinned_until(&image),
            _ => None,
        })
    }

    /// Pins an image until that time, or until the later one that is there. An image with a different pin keeps that
    /// one.
    pub(super) async fn pin(&self, name: &str, until: Timestamp) -> Result<(), Error> {
        let _update = self.update.lock().await;
        let image = self.get(name).await?;
        let image = image.ok_or_else(|| {
            self.call("containerd Images.Get")
                .invalid_response("it has no such image")
        })?;
        let end = pinned_until(&image);
        match is_pinned(&image) {
            true if end.is_none_or(|end| end >= until) => Ok(()),
            _ => {
                let until = end.map_or(until, |end| end.max(until)).to_string();
                self.set_labels(image, PINNED, &until).await
            }
        }
    }

    /// Ends the pins whose time has come; one that cannot be ended keeps no other.
    pub(super) async fn unpin_ended(&self, now: Timestamp) -> Result<ImagePins, Error> {
        let call = self.call("containerd Images.List");
        let request = ListImagesRequest {
            filters: vec![format!("labels.\"{PINNED_UNTIL_LABEL}\"")],
        };
        let mut client = self.client.clone();
        let answer = call.run(client.list(in_namespace(call.request(request)))).await?;
        let mut pins = ImagePins::default();
        let mut result = Ok(());
        for image in &answer.images {
            match pinned_until(image) {
                Some(end) if end > now => {
                    pins.count += usize::from(is_pinned(image));
                    pins.next_end = Some(pins.next_end.map_or(end, |next| next.min(end)));
                }
                _ => result = result.and(self.unpin(&image.name, now).await),
            }
        }
        result.map(|()| pins)
    }

    async fn unpin(&self, name: &str, now: Timestamp) -> Result<(), Error> {
        let _update = self.update.lock().await;
        match self.get(name).await? {
            // containerd removes a label whose value is empty.
            Some(image) if pinned_until(&image).is_some_and(|end| end <= now) => {
                self.set_labels(image, "", "").await
            }
            _ => Ok(()),
        }
    }

    /// `None` without such an image.
    async fn get(&self, name: &str) -> Result<Option<Image>, Error> {
        let call = self.call("containerd Images.Get");
        let request = GetImageRequest {
            name: name.to_owned(),
        };
        let mut client = self.client.clone();
        let answer = call
            .run_optional(client.get(in_namespace(call.request(request))))
            .await?;
        let image = answer.and_then(|answer| answer.image);
        Ok(image.filter(|image| image.target.is_some()))
    }

    /// Sets both labels of an image as it was read: containerd ends with a panic if its target is missing.
    async fn set_labels(&self, mut image: Image, pinned: &str, until: &str) -> Result<(), Error> {
        let labels = [(PINNED_LABEL, pinned), (PINNED_UNTIL_LABEL, until)];
        let paths = labels.iter().map(|(key, _)| format!("labels.{key}")).collect();
        image.labels = labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let call = self.call("containerd Images.Update");
        let request = UpdateImageRequest {
            image: Some(image),
            update_mask: Some(FieldMask { paths }),
            ..UpdateImageRequest::default()
        };
        let mut client = self.client.clone();
        call.run(client.update(in_namespace(call.request(request))))
            .await
            .map(|_| ())
    }

    fn call(&self, method: &'static str) -> Call<'_> {
        Call {
            socket: &self.socket,
            method,
            deadline: CALL_TIMEOUT,
        }
    }
}

fn is_pinned(image: &Image) -> bool {
    image
        .labels
        .get(PINNED_LABEL)
        .is_some_and(|value| value == PINNED)
}

/// The end of our pin; an unreadable one has ended.
fn pinned_until(image: &Image) -> Option<Timestamp> {
    let end = image.labels.get(PINNED_UNTIL_LABEL)?;
    Some(end.parse().unwrap_or(Timestamp::MIN))
}
