//! The service: lists and streams of what [`Live`] holds.

use std::pin::Pin;

use futures::Stream;
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::v1::node_control_server::NodeControl;
use super::v1::{
    ListPullsRequest, ListPullsResponse, ListRecreatesRequest, ListRecreatesResponse, ListRestartsRequest,
    ListRestartsResponse, ListRuntimesRequest, ListRuntimesResponse,
};
use super::view;
use crate::live::Live;

pub(super) struct Control {
    live: Live,
    shutdown: CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Control {
    pub(super) fn new(live: Live, shutdown: CancellationToken) -> Self {
        Self { live, shutdown }
    }

    /// The present value, then every new one, until shutdown.
    fn stream<S, T>(&self, source: &watch::Sender<S>, view: fn(S) -> T) -> Response<Answers<T>>
    where
        S: Clone + Send + Sync + 'static,
        T: Send + 'static,
    {
        let changes = WatchStream::new(source.subscribe()).map(move |value| Ok(view(value)));
        let end = self.shutdown.clone().cancelled_owned();
        Response::new(Box::pin(futures::StreamExt::take_until(changes, end)))
    }
}

#[tonic::async_trait]
impl NodeControl for Control {
    type WatchPullsStream = Answers<ListPullsResponse>;
    type WatchRecreatesStream = Answers<ListRecreatesResponse>;
    type WatchRestartsStream = Answers<ListRestartsResponse>;
    type WatchRuntimesStream = Answers<ListRuntimesResponse>;

    async fn list_pulls(&self, _: Request<ListPullsRequest>) -> Result<Response<ListPullsResponse>, Status> {
        Ok(Response::new(view::pulls(self.live.pulls.borrow().clone())))
    }

    async fn watch_pulls(
        &self,
        _: Request<ListPullsRequest>,
    ) -> Result<Response<Self::WatchPullsStream>, Status> {
        Ok(self.stream(&self.live.pulls, view::pulls))
    }

    async fn list_recreates(
        &self,
        _: Request<ListRecreatesRequest>,
    ) -> Result<Response<ListRecreatesResponse>, Status> {
        Ok(Response::new(view::recreates(
            self.live.recreates.borrow().clone(),
        )))
    }

    async fn watch_recreates(
        &self,
        _: Request<ListRecreatesRequest>,
    ) -> Result<Response<Self::WatchRecreatesStream>, Status> {
        Ok(self.stream(&self.live.recreates, view::recreates))
    }

    async fn list_restarts(
        &self,
        _: Request<ListRestartsRequest>,
    ) -> Result<Response<ListRestartsResponse>, Status> {
        Ok(Response::new(view::restarts(self.live.restarts.borrow().clone())))
    }

    async fn watch_restarts(
        &self,
        _: Request<ListRestartsRequest>,
    ) -> Result<Response<Self::WatchRestartsStream>, Status> {
        Ok(self.stream(&self.live.restarts, view::restarts))
    }

    async fn list_runtimes(
        &self,
        _: Request<ListRuntimesRequest>,
    ) -> Result<Response<ListRuntimesResponse>, Status> {
        Ok(Response::new(view::runtimes(self.live.runtimes.borrow().clone())))
    }

    async fn watch_runtimes(
        &self,
        _: Request<ListRuntimesRequest>,
    ) -> Result<Response<Self::WatchRuntimesStream>, Status> {
        Ok(self.stream(&self.live.runtimes, view::runtimes))
    }
}
